"""The rows of the parity table as models of enough layers for four stages, and how each is cut and scheduled.

By hand, a part of the whole table (rows x stages x schedules x micro-batches x recomputation), so many rows from a
random order: `python -m tests.support.pipeline_cases 100`, or of other hundreds of that order
`python -m tests.support.pipeline_cases 100 300`. `python -m tests.support.pipeline_cases hybrid` trains every case on
two replicas of two stages, and `python -m tests.support.pipeline_cases shards` in two stages of two shards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from typing import Any
from unittest import mock

import keras

import tfpar
from tests.properties.test_parity import Result, computing_in, differences, train
from tests.support.parity_cases import CASES, ONE_MICROBATCH_ONLY, Case
from tfpar.layout import Layout
from tfpar.pipeline import schedule as schedules
from tfpar.strategies import of_layout

SCHEDULES = schedules.NAMES
NUM_STAGES = (2, 3, 4)
BATCHES_OF_7 = (
    "global batch odd", "static batch shape", "class weights", "masked sequence", "outputs as dict", "outputs as list",
    "Adam", "AdamW", "RMSprop, learning rate schedule", "1 step a call", "3 steps a call",
    "more steps a call than the epoch holds", "AUC, precision, recall", "embedding, sparse gradients",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table under one pipeline, or under replicas of it."""

    case: str
    schedule: str
    num_stages: int
    num_microbatches: int
    recompute: bool
    dtype: str = "float64"
    num_replicas: int = 1
    num_shards: int = 1

    def __str__(self) -> str:
        """Return a name for a test."""
        replicas = f"{self.num_replicas}x" * (self.num_replicas > 1)
        shards = f" of {self.num_shards} shards" * (self.num_shards > 1)
        words = [self.case, self.schedule, f"{replicas}{self.num_stages}{shards}x{self.num_microbatches}"]
        return "-".join([*words, *["recompute"] * self.recompute, *["float32"] * (self.dtype == "float32")])

    @property
    def layout(self) -> Layout:
        """The grid; three stages of an interleaved schedule are in turn on one device."""
        stages_per_device = {2: 2, 3: 3, 4: 2}[self.num_stages] if self.schedule == "interleaved" else 1
        return Layout(
            self.num_replicas, self.num_stages, self.num_microbatches, self.schedule, self.recompute,
            num_shards=self.num_shards, stages_per_device=stages_per_device,
        )  # fmt: skip

    def strategy(self) -> tfpar.Strategy:
        devices = ["CPU:0"] if self.layout.stages_per_device == 3 else None
        # Not by time: the same cuts in every run.
        return of_layout(self.layout, devices, balance="parameters")

    @property
    def is_possible(self) -> bool:
        """Whether the batches are large enough and the schedule takes so many micro-batches."""
        most = 1 if self.case in ONE_MICROBATCH_ONLY else 7 if self.case in BATCHES_OF_7 else 8
        if self.num_microbatches * self.num_replicas > most:
            return False
        in_groups = self.schedule == "interleaved" and self.num_stages == 4
        return not (in_groups and self.num_microbatches % 2)


def deepened(case: Case) -> Case:
    """Return a case with further layers, where it has fewer than one for each of four stages."""

    def build() -> keras.Model:
        compiled: dict[str, Any] = {}
        with mock.patch.object(keras.Model, "compile", lambda model, *args, **more: compiled.update(args=args, **more)):
            model = case.build()
        model.name = "inner"  # logs are named after it, and not by how many models there were before
        missing = max(NUM_STAGES) - sum(not isinstance(layer, keras.layers.InputLayer) for layer in model.layers)
        inputs = keras.Input(model.inputs[0].shape[1:], dtype=model.inputs[0].dtype)
        grows_before = keras.backend.is_float_dtype(inputs.dtype)
        outputs = model(_more_layers(inputs, missing) if grows_before else inputs)
        deep = keras.Model(inputs, outputs if grows_before else _more_layers(outputs, missing))
        deep.compile(*compiled.pop("args"), **compiled)
        return deep

    return dataclasses.replace(case, build=build)


def _more_layers(features: Any, number: int) -> Any:
    for _ in range(number):
        features = keras.layers.Dense(features.shape[-1], "tanh")(features)
    return features


def everything() -> list[Row]:
    """Return the whole table."""
    rows = itertools.product(CASES, SCHEDULES, NUM_STAGES, range(1, 9), (False, True))
    return [row for row in itertools.starmap(Row, rows) if row.is_possible]


@functools.cache
def expected(case: str, dtype: str) -> Result:
    """Return history and weights of Keras' own `fit`, without any strategy; the same for all pipelines."""
    keras.utils.set_random_seed(0)
    deep = deepened(CASES[case])
    model = deep.build()
    return train(deep, model.fit, model)


def differences_of(row: Row) -> list[str]:
    """Train a row and return the differences from one device."""
    case = deepened(CASES[row.case])
    with computing_in(row.dtype):
        trainer = tfpar.Trainer(case.build, row.strategy(), seed=0)
        found = train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)
        return list(differences(found, expected(row.case, row.dtype), row.dtype))


def on_replicas(num_replicas: int = 2, num_shards: int = 1) -> list[Row]:
    """Return a row of every case on two replicas of two stages; schedules, types and recomputation take turns."""
    schedules = itertools.cycle(("1f1b", "gpipe", "zero_bubble"))
    kinds = itertools.cycle((("float64", False), ("float64", True), ("float32", False), ("float64", False)))
    sizes = itertools.cycle((2, 3, 1, 4, 1))
    rows = []
    for case, schedule, (dtype, recompute), size in zip(CASES, schedules, kinds, sizes, strict=False):
        row = Row(case, schedule, 2, size, recompute, dtype, num_replicas, num_shards)
        row = row if row.is_possible else dataclasses.replace(row, num_microbatches=1)
        rows += [row] if row.is_possible else []
    return rows


def main(number: str, first: str = "0") -> None:
    """Train rows of a random order of the whole table, or those on replicas, and print those that differ."""
    tfpar.use_logical_cpus(4)
    tables = {"hybrid": on_replicas, "shards": lambda: on_replicas(num_replicas=1, num_shards=2)}
    rows = tables.get(number, everything)()
    if number not in tables:
        random.Random(0).shuffle(rows)
        rows = rows[int(first) : int(first) + int(number)]
    for row in rows:
        found = differences_of(row)
        print(f"{row}: {'; '.join(found) or 'equal'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The number of compilations by XLA, which writes a file for each, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests import ROOT

pytestmark = pytest.mark.slow_start

# Global batches of 10, 10 and 5 examples: two replicas have parts of 5 and 3, and of 5 and 2; four micro-batches have
# 3, 3, 2 and 2, and 2, 1, 1 and 1.
NUM_EXAMPLES, BATCH_SIZE = 25, 10
TWO = ["CPU:0", "CPU:1"]


def independent() -> list[Any]:
    return [keras.layers.LayerNormalization(), keras.layers.Dropout(0.5)]


class LooksUp(keras.layers.Layer):
    """Looks up rows by computed numbers, whose kind a trial finds."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(4, 8))

    def call(self, features: Any) -> Any:
        return features + tf.gather(self.rows, tf.argmax(features, -1) % 4)


def looks_up() -> list[Any]:
    return [LooksUp()]


def normalized() -> list[Any]:
    return [keras.layers.BatchNormalization()]


CASES: dict[str, tuple[Callable[[], tfpar.Strategy], Callable[[], list[Any]]]] = {
    "one device": (lambda: tfpar.SingleDevice(), independent),
    "replicas": (lambda: tfpar.Mirrored(TWO), independent),
    "stages": (lambda: tfpar.Pipeline(2, 4, balance="parameters"), independent),
    "stages with a trial of lookups": (lambda: tfpar.Pipeline(2, 4, balance="parameters"), looks_up),
    "stages with statistics": (lambda: tfpar.Pipeline(2, 4, balance="parameters"), normalized),
}
PROGRAM = """
import sys
from pathlib import Path

import tfpar

tfpar.use_logical_cpus(2)

from tests.support import parity_cases
from tests.trainer import test_xla_compilations as this

counts, dumped = [], Path(sys.argv[1])


def count():
    counts.append(len(list(dumped.glob("*before_optimizations.txt"))) - sum(counts))


dataset = parity_cases.batches(this.NUM_EXAMPLES, this.BATCH_SIZE)
for strategy, layers in this.CASES.values():
    trainer = tfpar.Trainer(parity_cases.classifier(layers=layers, jit_compile=True), strategy(), seed=0)
    trainer.fit(dataset, epochs=3, verbose=0)
    count()
    trainer.evaluate(dataset, verbose=0)
    trainer.predict(parity_cases.inputs(this.NUM_EXAMPLES), batch_size=this.BATCH_SIZE, verbose=0)
    count()
print(this.json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """The compilations of three epochs of training, and of evaluation and prediction."""
    folder = tmp_path_factory.mktemp("dumped")
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(CASES, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "training", "inference"),
    [
        ("one device", 2, 4),  # sizes; evaluation and prediction
        ("replicas", 8, 8),  # passes, replicas and sizes; evaluation and prediction
        ("stages", 4, 2),  # passes and stages, of one size; evaluation and prediction have the same
        ("stages with a trial of lookups", 4, 2),
    ],
)
def test_xla_compiles_a_few_functions(
    counts: dict[str, tuple[int, int]], case: str, training: int, inference: int
) -> None:
    assert counts[case] == (training, inference)


def test_only_a_stage_with_statistics_of_the_batch_is_compiled_for_each_size(
    counts: dict[str, tuple[int, int]],
) -> None:
    training, inference = counts["stages with statistics"]
    assert 4 < training <= 12
    assert inference == 2

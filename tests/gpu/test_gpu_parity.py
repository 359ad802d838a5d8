"""Parity on GPUs: one device, replicas and pipelines give the losses, metrics and weights of Keras' own `fit`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import keras
import pytest

import tfpar
from tests.properties.test_parity import CASES, Result, computing_in, differences, table, train
from tests.properties.test_parity import STRATEGIES as STRATEGIES_ON_CPUS
from tests.support import pipeline_cases
from tests.support.parity_cases import Case
from tests.support.pipeline_cases import Row, deepened
from tfpar.pipeline import schedule as schedules

pytestmark = pytest.mark.gpu

# The names of the strategies in the table of CPUs.
STRATEGIES: dict[str, Callable[[Sequence[str]], tfpar.Strategy]] = {
    "single device": lambda gpus: tfpar.SingleDevice(gpus[1]),
    "mirrored over 2": lambda gpus: tfpar.Mirrored(gpus[:2]),
    "mirrored over 3, packed": lambda gpus: tfpar.Mirrored(gpus[:4], pack_bytes=256),
    "mirrored over 3, sharded": lambda gpus: tfpar.Mirrored(gpus[:3], shard="optimizer"),
    "mirrored over 3, weights sharded": lambda gpus: tfpar.Mirrored(gpus[:3], shard="weights"),
    "mirrored over 1": lambda gpus: tfpar.Mirrored(gpus[1:2]),
    "tensor parallel over 3": lambda gpus: tfpar.TensorParallel(len(gpus[:3]), devices=gpus[:3]),
    "2 replicas of tensor parallel over 2": lambda gpus: tfpar.Hybrid(tfpar.TensorParallel(2), 2, gpus[:4]),
}
# In float64, cuDNN leaves what was in the memory in masked time steps (TensorFlow 2.21), also in Keras' own fit.
IN_FLOAT32 = "masked sequence"
PIPELINED = ("Adam", "masked sequence", "outputs as dict", "embedding, sparse gradients")


def rows_of_pipelines() -> list[Row]:
    """Every schedule in two and in four stages, with one case after the other."""
    kinds = itertools.product(schedules.NAMES, (2, 4), (False, True))
    return [
        Row(case, schedule, num_stages, 4, recompute, "float32" if recompute or case == IN_FLOAT32 else "float64")
        for case, (schedule, num_stages, recompute) in zip(itertools.cycle(PIPELINED), kinds, strict=False)
    ]


@functools.cache
def reference(name: str, dtype: str, deep: bool = False) -> Result:
    """Keras' own `fit` without XLA, which Keras chooses by itself on machines with GPUs."""
    case = deepened(CASES[name]) if deep else CASES[name]
    keras.utils.set_random_seed(0)
    model = case.build()
    model.jit_compile = False
    return train(case, model.fit, model)


def check(case: Case, strategy: tfpar.Strategy, expected: Result, dtype: str) -> None:
    trainer = tfpar.Trainer(case.build, strategy, seed=0)
    trainer.model.jit_compile = False
    found = train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)
    assert not list(differences(found, expected, dtype))


def rows() -> list[tuple[str, str, str]]:
    """The rows of CPUs; that of the masked sequence in float32."""
    return [
        ("float32" if name == IN_FLOAT32 else dtype, strategy, name) for dtype, strategy, name in table(whole=False)
    ]


@pytest.mark.parametrize(("dtype", "strategy", "name"), rows())
def test_equals_one_device_after_20_steps(gpus: list[str], dtype: str, strategy: str, name: str) -> None:
    if strategy.startswith("2 replicas of") and len(gpus) < 4:
        pytest.skip(f"the replicas need 4 devices, and there are {len(gpus)}")
    with computing_in(dtype):
        check(CASES[name], STRATEGIES[strategy](gpus), reference(name, dtype), dtype)


@pytest.mark.parametrize("row", rows_of_pipelines(), ids=str)
def test_a_pipeline_equals_one_device_after_20_steps(gpus: list[str], row: Row) -> None:
    num_devices = schedules.make(row.schedule, row.num_stages, row.num_microbatches, None).num_devices
    if num_devices > len(gpus):
        pytest.skip(f"the schedule needs {num_devices} devices, and there are {len(gpus)}")
    strategy = tfpar.Pipeline(
        row.num_stages, row.num_microbatches, row.schedule, "parameters", gpus[:num_devices], row.recompute
    )
    with computing_in(row.dtype):
        check(deepened(CASES[row.case]), strategy, reference(row.case, row.dtype, deep=True), row.dtype)


def test_the_table_has_the_strategies_of_cpus() -> None:
    assert {*STRATEGIES} == {*STRATEGIES_ON_CPUS}


def test_the_cases_of_pipelines_are_in_the_table() -> None:
    assert {*PIPELINED} < {*pipeline_cases.CASES}
    assert len({dataclasses.astuple(row)[1:3] for row in rows_of_pipelines()}) == 2 * len(schedules.NAMES)

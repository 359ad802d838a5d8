"""The data of a plan: all kinds that `fit` takes, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfpar
from tests.support import small
from tfpar import data
from tfpar.planning import given_data, step_timing

pytestmark = pytest.mark.usefixtures("logical_cpus")
INPUTS, TARGETS = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")


class Stored(keras.utils.PyDataset):
    """Ten examples in batches of four."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ends = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(4 * index, 4 * index + 4)
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        self.num_ends += 1


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield INPUTS[:4], TARGETS[:4]
    yield INPUTS[4:8], TARGETS[4:8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: (tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4),),
        lambda: (INPUTS, TARGETS),
        lambda: (pd.DataFrame(INPUTS), pd.DataFrame(TARGETS)),
        lambda: (Stored(),),
        lambda: (generated(),),
    ],
    ids=["dataset", "arrays", "frames", "PyDataset", "generator"],
)
def test_the_first_batch_is_read_with_the_wait_for_others(make: Callable[[], tuple[Any, ...]]) -> None:
    given = given_data.read(data.as_dataset(*make(), batch_size=4))
    (batch,) = given.first
    assert [part.shape for part in batch] == [(4, 4), (4, 1)]
    assert given.wait_seconds > 0
    assert [spec.shape.as_list()[1:] for spec in given.first.element_spec] == [[4], [1]]


def test_reading_calls_no_hook_of_an_epoch() -> None:
    stored = Stored()
    given_data.read(data.as_dataset(stored))
    assert stored.num_ends == 0


@pytest.mark.parametrize(
    "make",
    [lambda: tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4).take(0), lambda: (one for one in ())],
    ids=["dataset", "generator"],
)
def test_no_examples_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must yield at least one batch"):
        given_data.read(data.as_dataset(make()))


def test_a_generator_that_ends_is_planned(monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]) -> None:
    monkeypatch.setattr(step_timing, "SECONDS_OF_REPEAT", 0.002)
    monkeypatch.setattr(step_timing, "ROUNDS", 1)
    plan = tfpar.plan(
        small.build_model, (batch for batch in list(small.data())), devices=logical_cpus[:2], measured_layouts=1
    )
    assert {row.layout.kind for row in plan.rows} >= {"single_device", "mirrored"}


@pytest.mark.parametrize("arguments", [(), (INPUTS, TARGETS, TARGETS, TARGETS)], ids=len)
def test_a_tuple_of_no_or_four_arrays_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"A tuple of arrays must be \(inputs,\), .*received a tuple of"):
        tfpar.plan(small.build_model, arguments)


def test_a_number_of_layouts_to_measure_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="measured_layouts must be at least 0, received -1"):
        tfpar.plan(small.build_model, small.data(), measured_layouts=-1)

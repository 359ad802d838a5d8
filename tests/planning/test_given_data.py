"""The data of a plan: all kinds that `fit` takes, read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfpar
from tests.support import input_cases as cases
from tests.support import small
from tests.support.input_cases import BATCH_SIZE, FEATURES, LABELS, Rows
from tfpar import data
from tfpar.planning import given_data, step_timing

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]
INPUTS, TARGETS = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Measure for a moment only: no test here depends on how exact the seconds are."""
    with mock.patch.object(step_timing, "SECONDS_OF_REPEAT", 0.002), mock.patch.object(step_timing, "ROUNDS", 1):
        yield


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


def test_the_processor_time_of_a_batch_is_that_of_its_source() -> None:
    def slow(number: tf.Tensor) -> tf.Tensor:
        return tf.linalg.trace(tf.matmul(*[tf.fill([1600, 1600], tf.cast(number, tf.float32))] * 2))

    numbers = tf.data.Dataset.range(16)
    computed, stored = (given_data.read(one.batch(2)).core_seconds for one in (numbers.map(slow), numbers))
    assert computed > stored + 0.005


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


@pytest.mark.extended
def test_a_generator_that_ends_is_planned(logical_cpus: list[str]) -> None:
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


def arguments_of(name: str) -> tuple[Any, ...]:
    if name in cases.NEED_TORCH and not cases.HAS_TORCH:
        pytest.skip("torch is not installed")
    arguments = cases.CASES[name].arguments()
    return tuple(arguments[key] for key in ("x", "y", "sample_weight") if key in arguments)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["sparse, own layer", "ragged, own layer", "None in a generator"])
def test_a_plan_takes_what_fit_takes(name: str) -> None:
    plan = tfpar.plan(cases.CASES[name].model, arguments_of(name), batch_size=BATCH_SIZE, devices=["CPU:0"])
    assert plan.model.batch == BATCH_SIZE
    assert plan.model.blocks
    assert plan.rows[0].memory_bytes > 0


def shards() -> tfpar.data.Sharded:
    examples = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    return tfpar.data.Sharded(lambda shard: examples.shard(2, shard), 2, BATCH_SIZE)


@pytest.mark.parametrize(
    "make",
    [
        shards,
        lambda: arguments_of("endless PyDataset, two threads")[0],
        lambda: arguments_of("DataLoader")[0],
        lambda: arguments_of("generator with weights")[0],
        lambda: arguments_of("ragged generator")[0],
    ],
)
def test_the_first_batch_of_all_data_is_read_with_the_shapes_of_all_batches(make: Callable[[], Any]) -> None:
    read = given_data.read(make())
    [batch] = read.first
    assert int(tfpar.data.num_rows(batch)) == BATCH_SIZE
    assert all(leaf.shape[0] is None for leaf in tf.nest.flatten(read.first.element_spec))
    assert read.wait_seconds > 0


@pytest.mark.extended
def test_all_trainers_share_one_pass_over_the_first_batches_in_which_no_hook_is_called() -> None:
    rows = Rows()
    plan = tfpar.plan(small.build_model, rows, devices=["CPU:0", "CPU:1"], measured_layouts=0)
    assert len(plan.rows) > 1
    assert rows.calls == [0, 1, 0, 1, 2, 3, 4]  # two for the shapes, as in fit


def fails_later() -> Iterator[Any]:
    yield from [(FEATURES[:8], LABELS[:8])] * 2
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: small.data().take(0), ValueError, "A dataset must yield at least one batch, and this one is empty"),
        (lambda: small.data().filter(lambda *batch: False), ValueError, "must yield at least one batch"),
        (lambda: cases.generate(times=0), ValueError, "must yield at least one batch"),
        (lambda: (FEATURES[:0], LABELS[:0]), ValueError, "hold no examples"),
        (lambda: cases.dataset(FEATURES, LABELS).map(lambda *batch: tfpar.data.take_rows(batch, 0, 0)), ValueError,
         "the first batch, which must hold at least one example, and it is empty"),
        (lambda: small.data().unbatch(), ValueError, "must be a batch"),
        (lambda: FEATURES, ValueError, "needs targets, and the data yields inputs alone"),
        (lambda: (Rows(), LABELS), ValueError, "`y` should not be passed"),
        (lambda: cases.generate, TypeError, r"Call it: generate\(\) is a generator of batches"),
        (lambda: None, ValueError, "received no array"),
        (fails_later, ValueError, "OSError: the disk is gone"),
    ],
)  # fmt: skip
def test_other_data_are_refused_in_one_sentence_before_a_step(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    no_steps = mock.patch.object(step_timing.TimedLoop, "run", side_effect=AssertionError("a step ran"))
    with no_steps, pytest.raises(error, match=message) as caught:
        tfpar.plan(small.build_model, make(), devices=["CPU:0"])
    assert "\n" not in str(caught.value)


def test_the_only_batch_is_awaited_without_the_start_of_the_data() -> None:
    passes = []

    def slow_start() -> Iterator[Any]:
        passes.append(1)
        if len(passes) == 1:
            time.sleep(0.3)
        yield np.ones(2)

    dataset = tf.data.Dataset.from_generator(slow_start, output_signature=tf.TensorSpec([2]))
    assert given_data.read(dataset).wait_seconds < 0.3

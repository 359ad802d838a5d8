"""The inner loop: the number of steps of a call, its end, and the state for the next call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tfpar import data
from tfpar.engines.distributed import Distributed
from tfpar.engines.steps.batches_ahead import HOST, StepBatch
from tfpar.engines.steps.launched_steps import LaunchedSteps
from tfpar.engines.steps.multi_step import SECONDS_PER_CALL, CallResult, LoopParts, StepLoop, StepsPerCall, compile_loop
from tfpar.loops.epoch_iterator import EpochIterator

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


# --- how many steps a call --------------------------------------------------------------------------------------------


def recorded(*calls: tuple[int, float], fixed: int | None = None) -> StepsPerCall:
    steps = StepsPerCall(fixed)
    for num_steps, seconds in calls:
        steps.record(num_steps, seconds)
    return steps


def test_the_first_call_is_not_measured_because_it_compiles() -> None:
    assert recorded((1, 30.0), (1, SECONDS_PER_CALL / 5)).next() == 5
    assert recorded((1, 1e-9)).next() == 1


def test_a_call_takes_about_a_tenth_of_a_second() -> None:
    assert SECONDS_PER_CALL == 0.1
    assert recorded((1, 1.0), (1, 0.01), (10, 0.1)).next() == 10
    assert recorded((1, 1.0), (1, 0.01), (10, 0.05)).next() == 20


def test_the_number_grows_at_most_tenfold_a_call() -> None:
    steps = recorded((1, 1.0))
    for expected in (10, 100, 1000):
        steps.record(steps.next(), 1e-7)
        assert steps.next() == expected


def test_the_number_falls_at_once_where_steps_become_slow() -> None:
    steps = recorded((1, 1.0), (1, 1e-7), (10, 1e-7), (100, 10.0))
    assert steps.next() == 1, "a step of a tenth of a second"


def test_a_fixed_number_of_steps_never_changes() -> None:
    assert recorded((1, 9.0), (1, 9.0), (1, 1e-9), fixed=7).next() == 7


# --- the loop ---------------------------------------------------------------------------------------------------------


class Adder:
    """Adds batches to a total; its loss is the batch itself."""

    def __init__(self, make: Callable[..., StepLoop] = compile_loop, device: str | None = None) -> None:
        self.total = tf.Variable(0.0)
        parts = LoopParts(
            self._step,
            lambda: {"total": self.total.read_value()},
            lambda batch: tf.constant(3, tf.int64),
            lambda upcoming: upcoming.has_value(),
            lambda element: StepBatch(element, [device or HOST]),
            self._digest,
            device=device,
        )
        self.run = make(parts)

    def _step(self, batch: tf.Tensor) -> tf.Tensor:
        self.total.assign_add(tf.where(tf.math.is_finite(batch), batch, 0.0))
        return batch

    def _digest(self, element: Any) -> Any:
        is_spec = isinstance(element, tf.TypeSpec)
        return tf.TensorSpec([2], tf.float32) if is_spec else tf.stack([element, -element])

    def call(self, epoch_iterator: EpochIterator, num_steps: int, *stops: bool) -> CallResult:
        result = self.run(epoch_iterator.iterator, epoch_iterator.upcoming, num_steps, *stops)
        epoch_iterator.advance(result.upcoming, int(result.num_steps))
        return result


LOOPS: dict[str, Callable[[], Adder]] = {
    "compiled": Adder,
    "compiled for another device": lambda: Adder(device="CPU:1"),
    "eager": lambda: Adder(functools.partial(compile_loop, run_eagerly=True)),
    "launched": lambda: Adder(LaunchedSteps),
    "launched on another device": lambda: Adder(LaunchedSteps, "CPU:1"),
}


@pytest.fixture(params=LOOPS)
def adder(request: pytest.FixtureRequest) -> Adder:
    return LOOPS[request.param]()


def epoch_iterator(*values: float, **arguments: Any) -> EpochIterator:
    return EpochIterator(
        Distributed(tf.data.Dataset.from_tensor_slices([float(value) for value in values])), **arguments
    )


def test_a_call_runs_the_steps_asked_for_and_leaves_the_next_batch(adder: Adder) -> None:
    batches = epoch_iterator(1, 2, 4, 8, 16)
    result = adder.call(batches, 3)
    assert int(result.num_steps) == 3
    assert float(result.logs["total"]) == 7, "the logs are those after the last step"
    assert float(result.num_examples) == 9
    np.testing.assert_array_equal(result.digests, [[1, -1], [2, -2], [4, -4]])
    assert float(batches.peek()) == 8, "no batch is lost between calls"
    assert batches.batches == 3


def test_a_call_ends_with_the_data(adder: Adder) -> None:
    batches = epoch_iterator(1, 2, 4)
    result = adder.call(batches, 1000)
    assert int(result.num_steps) == 3
    assert float(result.logs["total"]) == 7
    assert not batches.has_more()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_call_counts_the_steps_before_the_first_loss_that_is_not_finite(adder: Adder, bad: float) -> None:
    batches = epoch_iterator(1, bad, 4, bad, 8)
    result = adder.call(batches, 4)
    assert int(result.num_steps) == 4, "no step waits for the loss of the previous one"
    assert int(result.num_finite) == 1
    assert float(batches.peek()) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_call_that_has_to_stops_after_the_step_whose_loss_is_not_finite(adder: Adder, bad: float) -> None:
    batches = epoch_iterator(1, bad, 4, 8)
    result = adder.call(batches, 4, True)
    assert int(result.num_steps) == 2, "the bad step is the last one done"
    assert int(result.num_finite) == 1
    assert float(batches.peek()) == 4


# --- the devices of the loop


@pytest.mark.parametrize("loop", ["compiled", "launched"])
def test_waiting_for_data_is_measured(loop: str) -> None:
    def slow(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.py_function(lambda: __import__("time").sleep(0.03), [], [])]):
            return tf.identity(value)

    adder = LOOPS[loop]()
    batches = EpochIterator(Distributed(tf.data.Dataset.from_tensor_slices([1.0] * 6).map(slow)))
    waited = float(adder.call(batches, 4).data_wait_seconds)
    assert 0.08 < waited < 5, f"four batches of at least 0.03 s each, waited {waited:.3f} s"
    assert float(LOOPS[loop]().call(epoch_iterator(*[1] * 6), 4).data_wait_seconds) < waited


# --- passes -----------------------------------------------------------------------------------------------------------


def drain(batches: EpochIterator, num_steps: int | None = None) -> list[float]:
    """Take what an epoch yields."""
    batches.begin_epoch()
    taken = rest(batches, num_steps)
    batches.end_epoch(len(taken))
    return taken


def rest(batches: EpochIterator, num_steps: int | None = None) -> list[float]:
    """Take what is left of an epoch."""
    taken: list[float] = []
    limit = batches.steps_per_epoch if num_steps is None else num_steps
    while batches.has_more() and (limit is None or len(taken) < limit):
        taken.append(float(batches.peek()))
        batches.advance(batches.iterator.get_next_as_optional(), 1)
    return taken


def test_an_epoch_is_a_pass() -> None:
    batches = epoch_iterator(1, 2, 3)
    assert batches.steps_per_epoch == 3
    assert [drain(batches) for _ in range(3)] == [[1, 2, 3]] * 3


def test_an_epoch_cut_short_is_followed_by_a_new_pass() -> None:
    batches = epoch_iterator(1, 2, 3)
    assert drain(batches, 2) == [1, 2]
    assert drain(batches) == [1, 2, 3]


def test_epochs_of_given_length_follow_one_another_within_a_pass() -> None:
    batches = epoch_iterator(1, 2, 3, 4, 5, steps_per_epoch=2)
    assert [drain(batches) for _ in range(4)] == [[1, 2], [3, 4], [5], [1, 2]]


def test_an_epoch_says_whether_it_ran_out_of_data() -> None:
    batches = epoch_iterator(1, 2, 3, steps_per_epoch=2)
    ended = []
    for _ in range(3):
        batches.begin_epoch()
        ended.append(batches.end_epoch(len(rest(batches))))
    assert ended == [False, True, False]


def test_a_dataset_of_unknown_length_is_taken_to_its_end() -> None:
    batches = EpochIterator(
        Distributed(tf.data.Dataset.range(5).filter(lambda value: value % 2 == 0).map(lambda value: value))
    )
    assert batches.steps_per_epoch is None
    assert [drain(batches) for _ in range(2)] == [[0, 2, 4]] * 2


def shuffled(**arguments: Any) -> EpochIterator:
    return EpochIterator(
        Distributed(tf.data.Dataset.range(8).shuffle(8, seed=1, reshuffle_each_iteration=True)), **arguments
    )


def test_every_pass_has_the_order_in_which_the_dataset_iterates() -> None:
    tf.random.set_seed(0)
    dataset = tf.data.Dataset.range(8).shuffle(8, seed=1, reshuffle_each_iteration=True)
    expected = [[float(value) for value in dataset] for _ in range(3)]
    tf.random.set_seed(0)
    batches = shuffled()
    assert [drain(batches) for _ in range(3)] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
@pytest.mark.parametrize("taken", [0, 1, 3, 8, 11, 16, 20])
def test_seek_moves_to_the_position_of_another_process(taken: int, steps_per_epoch: int | None) -> None:
    def position_after(num_batches: int) -> tuple[EpochIterator, tuple[int, int]]:
        tf.random.set_seed(0)
        batches = shuffled(steps_per_epoch=steps_per_epoch)
        for _ in range(num_batches):
            if not batches.has_more():
                batches.end_epoch(0)
                batches.begin_epoch()
            batches.advance(batches.iterator.get_next_as_optional(), 1)
        return batches, (batches.passes, batches.batches)

    first, position = position_after(taken)
    tf.random.set_seed(0)
    second = shuffled(steps_per_epoch=steps_per_epoch)
    second.seek(*position)
    assert rest(second, 5) == rest(first, 5)
    assert [drain(second, 5) for _ in range(2)] == [drain(first, 5) for _ in range(2)]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="A dataset must yield at least one batch, but this one is empty"):
        EpochIterator(Distributed(tf.data.Dataset.range(0)))


# The loop of predict: outputs are copied while the next step runs, and joined on the host


def test_outputs_are_copied_after_the_next_step_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    copied = data.to_numpy
    monkeypatch.setattr(data, "to_numpy", lambda tensor: (events.append("copy"), copied(tensor))[1])
    begins = keras.callbacks.LambdaCallback(on_predict_batch_begin=lambda batch, logs: events.append("step"))
    outputs = trainer.predict(parity_cases.inputs(20), batch_size=8, verbose=0, callbacks=begins)
    assert events == ["step", "step", "copy", "step", "copy", "copy"]
    np.testing.assert_allclose(outputs, trainer.model.predict(parity_cases.inputs(20), verbose=0), rtol=1e-5)


def test_a_callback_that_stops_keeps_the_outputs_of_its_step() -> None:
    class Stop(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    assert trainer.predict(parity_cases.inputs(20), batch_size=8, verbose=0, callbacks=Stop()).shape == (16, 3)

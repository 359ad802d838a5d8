"""The upcoming batch is on the devices that read it before its step begins, and every step reads its own batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import placement_cases
from tfpar.engines.distributed import Distributed
from tfpar.engines.steps.batches_ahead import HOST, BatchesAhead, StepBatch
from tfpar.engines.steps.launched_steps import LaunchedSteps
from tfpar.engines.steps.multi_step import LoopParts, StepLoop, compile_loop
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.model_function import make_model
from tfpar.loops.preparation import Preparation

pytestmark = pytest.mark.usefixtures("logical_cpus")
STRATEGIES = {name: placement_cases.STRATEGIES[name] for name in ("single_device", "mirrored", "pipeline", "hybrid")}
DEVICES = ["CPU:1", "CPU:2"]
each_loop = pytest.mark.parametrize("make", [compile_loop, LaunchedSteps])


class Recorder:
    """Records the batch of each step, whose two tensors are on two devices."""

    def __init__(self, make: Callable[..., StepLoop]) -> None:
        self.seen = tf.Variable(tf.zeros([0, 2]), shape=[None, 2])
        parts = LoopParts(
            self._step,
            lambda: {},
            lambda element: tf.constant(1, tf.int64),
            lambda upcoming: upcoming.has_value(),
            lambda element: StepBatch((element, -element), DEVICES),
        )
        self.loop = make(parts)

    def _step(self, batch: Any) -> tf.Tensor:
        self.seen.assign(tf.concat([self.seen, [tf.stack(batch)]], 0))
        with tf.control_dependencies([tf.debugging.assert_less(batch[0], 100.0)]):
            return tf.identity(batch[0])

    def call(self, batches: EpochIterator, num_steps: int) -> None:
        result = self.loop(batches.iterator, batches.upcoming, num_steps)
        batches.advance(result.upcoming, int(result.num_steps))

    def batches(self) -> list[float]:
        seen = self.seen.numpy()
        np.testing.assert_array_equal(seen[:, 0], -seen[:, 1])
        return list(seen[:, 0])


def batches(*values: float) -> EpochIterator:
    return EpochIterator(Distributed(tf.data.Dataset.from_tensor_slices([float(value) for value in values])))


@each_loop
def test_every_step_reads_its_own_batch_over_calls_and_passes(make: Callable[..., StepLoop]) -> None:
    recorder, taken = Recorder(make), batches(1, 2, 3, 4, 5)
    for _ in range(2):
        taken.begin_epoch()
        for num_steps in (1, 2, 10):
            recorder.call(taken, num_steps)
        taken.end_epoch(5)
    assert recorder.batches() == [1, 2, 3, 4, 5] * 2


@each_loop
def test_iterators_may_take_turns_in_one_loop(make: Callable[..., StepLoop]) -> None:
    """As where a callback evaluates in the middle of an evaluation."""
    recorder, one, other = Recorder(make), batches(1, 2, 3), batches(4, 5, 6)
    for turn in (one, other, one, other):
        recorder.call(turn, 1)
    recorder.call(one, 1)
    assert recorder.batches() == [1, 4, 2, 5, 3]


@each_loop
def test_a_call_after_an_error_reads_its_own_batch(make: Callable[..., StepLoop]) -> None:
    recorder, taken = Recorder(make), batches(1, 2, 1000, 3)
    recorder.call(taken, 1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        recorder.call(taken, 3)
    recorder.call(taken, 1)
    assert recorder.batches()[-1] == 2, "the upcoming batch is still the second one"


def test_the_memory_of_the_last_batch_is_free_after_it() -> None:
    ahead = BatchesAhead(lambda element: StepBatch(element, ["CPU:1"]))
    element = tf.experimental.Optional.from_value(tf.zeros([2]))
    with tf.device(HOST):
        ahead.fill(element)
        assert ahead.receive(tf.zeros([2])).device.endswith("CPU:1")
        ahead.refill(tf.experimental.Optional.empty(element.element_spec))
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a value"):
            ahead.receive(tf.zeros([2]))


def test_integers_of_32_bits_texts_and_ragged_tensors_stay_on_the_host() -> None:
    batch = (
        tf.constant([1.0]),
        tf.constant([1]),
        tf.constant(["a"]),
        tf.ragged.constant([[1]]),
        None,
        tf.constant([2], tf.int64),
    )
    ahead = BatchesAhead(lambda element: StepBatch(element, ["CPU:1"] * 6))
    ahead.fill(tf.experimental.Optional.from_value(batch))
    received = ahead.receive(batch)
    assert [one is given for one, given in zip(received, batch, strict=True)] == [False, True, True, True, True, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_tensor_is_for_the_devices_that_take_it(strategy: str) -> None:
    made = STRATEGIES[strategy]()
    built = make_model(placement_cases.MODELS["cnn"], made, 0)
    epoch_iterator, _ = Preparation(built, made).prepare_loop(placement_cases.data("cnn"), None, "train")
    batch, devices = made.engine.step_batch(built, epoch_iterator.peek())
    leaves = tf.nest.flatten(batch)
    short = [device[-5:] for leaf, device in zip(leaves, devices, strict=True) if leaf is not None]
    if strategy == "single_device":
        assert short == ["CPU:1", "CPU:1"]
    elif strategy == "mirrored":
        assert short == ["CPU:1", "CPU:1", "CPU:2", "CPU:2", "CPU:0", "CPU:0", "CPU:0"]
    elif strategy == "hybrid":  # the whole batch; of each replica its first example, its inputs and its targets
        assert short == ["CPU:0", "CPU:0", "CPU:0", "CPU:1", "CPU:1", "CPU:0", "CPU:2", "CPU:2"]
        assert [len(leaves[index]) for index in (0, 3, 4, 6, 7)] == [5, 3, 3, 2, 2]
    else:  # the inputs as given, of which the step takes the number; the targets; the inputs of the first stage
        assert short == ["CPU:0", "CPU:2", "CPU:1"]

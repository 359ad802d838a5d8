"""The seconds of a model's training step on one device, by the number of examples."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model
from tfpar.loops.step_functions import StepFunctions
from tfpar.pipeline.partition.layer_profile import wait_for_gpus
from tfpar.planning import spread
from tfpar.planning.costs import Curve
from tfpar.planning.graph_reading import needed_operations
from tfpar.reduction import gathered_classes
from tfpar.strategies import Strategy
from tfpar.strategies.tensor_parallel.pieces import gathered

ROUNDS = 2
_REPEATS = 4
_REPEATS_OF_LONG = 2
SECONDS_OF_REPEAT = 0.15
_MOST_STEPS = 2000
_LONG_SECONDS = 1.0
_TURNS = 5
_SMALL_SPREAD, _MOST_TRIES_OF_DRIFT = 0.05, 3
# Beyond these the step is predicted from smaller batches, by a line.
_FEWEST_SIZES = 4
_MOST_SECONDS_OF_SIZE = 8.0


class TimedLoop:
    """The training steps of a model on one device, in the compiled loop of `fit`, with batches of any size.

    The steps change the weights.

    Args:
        model: A compiled model that is built.
        strategy: Its strategy, with one device.
        batch: A global batch, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, batch: Any) -> None:
        self._size = tf.Variable(1, dtype=tf.int64, trainable=False)
        with tf.device("CPU:0"):
            dataset = tf.data.Dataset.from_tensors(batch).cache().repeat()
            dataset = dataset.map(lambda *parts: _first(parts, self._size), num_parallel_calls=1).prefetch(2)
        distributed = strategy.distribute(dataset)
        self._loop = StepFunctions(model, strategy).loop("train", distributed)
        self._dataset = data.without_autotuning(distributed.dataset)
        self.resize(int(data.num_rows(batch)))

    def resize(self, num_examples: int) -> None:
        """Use batches of another size, at most that of the given batch."""
        self._size.assign(num_examples)
        self._begin_data()

    def twin(self) -> TimedLoop:
        """Return a loop of the same compiled steps, model and size, which another thread can run at the same time."""
        twin = copy.copy(self)
        twin._begin_data()
        return twin

    def _begin_data(self) -> None:
        self._iterator = iter(self._dataset)
        self._upcoming = self._iterator.get_next_as_optional()

    def run(self, num_steps: int) -> None:
        """Run steps, and wait for their end."""
        result = self._loop(self._iterator, self._upcoming, num_steps)
        result.num_steps.numpy()
        self._upcoming = result.upcoming
        wait_for_gpus()


def measure_steps(loop: TimedLoop, sizes: Sequence[int]) -> tuple[Curve, float]:
    """Measure training steps at several numbers of examples.

    A size that does not fit in the memory of the device, or takes long, is left out, with all larger ones.

    Args:
        loop: The steps.
        sizes: Numbers of examples, each at most those of the batch.

    Returns:
        The seconds of a step by its number of examples, ascending: the lower quartile, since other processes only make
        steps longer. And the spread of the repeats, the median of all sizes.

    Raises:
        MemoryError: If the device has not enough memory for a step of the smallest size.
    """
    found: dict[int, list[float]] = {size: [] for size in sorted(set(sizes))}
    for number in range(ROUNDS + 1):  # other processes of the machine disturb one round more than another
        for size in list(found):
            if number and min(found[size]) > _LONG_SECONDS:
                continue
            if number == ROUNDS and spread.of_repeats(found[size]) <= _SMALL_SPREAD:
                continue  # one round more is for sizes that were disturbed
            if not number and _is_too_long(found, size):
                found = {smaller: seconds for smaller, seconds in found.items() if smaller < size}
                break
            try:
                loop.resize(size)
                found[size] += repeated_seconds(loop.run)
            except tf.errors.ResourceExhaustedError as error:
                found = {smaller: seconds for smaller, seconds in found.items() if smaller < size}
                if not found:
                    raise _too_large(size) from error
                break
    lows = tuple(map(spread.low, found.values()))
    return Curve(tuple(found), lows), statistics.median(map(spread.of_repeats, found.values()))


def measure_drift(loop: TimedLoop, steps: Curve) -> float:
    """Measure the step of the largest size again, and compare it with that of an earlier measurement.

    A disturbance of a moment is no drift: a step that takes another time is measured a few times, and its nearest time
    counts.

    Args:
        loop: The steps.
        steps: Their earlier measurement.

    Returns:
        How much longer one of both is, relative to the other; 0 where the device has not enough memory any more.
    """
    first = steps.seconds[-1]
    drift = math.inf
    try:
        loop.resize(steps.sizes[-1])
        for number in range(_MOST_TRIES_OF_DRIFT):
            again = [_timed(loop.run, 1)] if first > SECONDS_OF_REPEAT else repeated_seconds(loop.run)
            drift = min(drift, spread.between(first, spread.low(again)))
            if drift <= _SMALL_SPREAD or (number and first > _LONG_SECONDS):
                break
    except tf.errors.ResourceExhaustedError:
        return 0.0
    return drift


def _is_too_long(found: dict[int, list[float]], size: int) -> bool:
    """Return whether the repeats of a size would take too long, after enough smaller ones to predict it."""
    smaller = [one for one in found if one < size and found[one]]
    if len(smaller) < _FEWEST_SIZES:
        return False
    step_seconds = min(found[smaller[-1]]) * size / smaller[-1]
    return (_REPEATS_OF_LONG + 2) * step_seconds > _MOST_SECONDS_OF_SIZE


def _too_large(size: int) -> MemoryError:
    return MemoryError(
        f"A device must have the memory of a training step, and a step of {size} example{'s' * (size != 1)} ran out of "
        "it. Measure with a smaller training.global_batch_size, or with fewer layers."
    )


def _first(parts: tuple[Any, ...], size: tf.Variable) -> Any:
    return data.take_rows(parts if len(parts) > 1 else parts[0], 0, size.read_value())


def repeated_seconds(run: Callable[[int], Any]) -> list[float]:
    """Return the seconds of one of many steps, measured several times.

    Args:
        run: Runs a number of steps.

    Example:
        >>> len(repeated_seconds(lambda num_steps: None))
        4
    """
    run(1)  # compiles
    seconds = _timed(run, 1)
    if seconds > SECONDS_OF_REPEAT:
        return [seconds, *(_timed(run, 1) for _ in range(_REPEATS_OF_LONG))]
    count = max(2, min(_MOST_STEPS, round(SECONDS_OF_REPEAT / max(seconds, 1e-9))))
    return [_timed(run, count) / count for _ in range(_REPEATS)]


def alternate_seconds(loops: Sequence[TimedLoop]) -> list[float]:
    """Return the median seconds of a step of each of several loops, measured in turns.

    What else the machine does then disturbs all of them, and their ratio less.

    Args:
        loops: The steps, one after another.
    """
    for loop in loops:
        loop.run(1)  # compiles
    counts = [max(1, round(SECONDS_OF_REPEAT / max(_timed(loop.run, 1), 1e-9))) for loop in loops]
    turns = [
        [_timed(loop.run, count) / count for loop, count in zip(loops, counts, strict=True)] for _ in range(_TURNS)
    ]
    return [statistics.median(seconds) for seconds in zip(*turns, strict=True)]


def _timed(run: Callable[[int], Any], num_steps: int) -> float:
    began_seconds = time.perf_counter()
    run(num_steps)
    return time.perf_counter() - began_seconds


def measure_loss(model: keras.Model, device: str, batch: Any) -> float:
    """Measure the loss of a batch and its gradient by the outputs.

    Args:
        model: A compiled model.
        device: Its device.
        batch: Examples, `[batch, ...]` each.

    Returns:
        The median seconds, without those of a call.
    """
    seconds = _loss_seconds(model, device, batch, 1)
    assert seconds is not None, "a whole output is read as it is"
    return seconds


def measure_loss_of_pieces(model: keras.Model, device: str, batch: Any, num_pieces: int) -> float | None:
    """Measure the loss of a batch and its gradient by outputs in pieces, as tensor parallelism leaves them.

    Args:
        model: A compiled model.
        device: A device, that of all pieces here.
        batch: Examples, `[batch, ...]` each.
        num_pieces: Pieces of the last axis of each output.

    Returns:
        The median seconds of all pieces together, without those of a call; None if the loss gathers an output, as a
        mean squared error does, or if the device has not enough memory for both.
    """
    try:
        return _loss_seconds(model, device, batch, num_pieces)
    except tf.errors.ResourceExhaustedError:
        return None


def _loss_seconds(model: keras.Model, device: str, batch: Any, num_pieces: int) -> float | None:
    inputs, targets, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.device(device):
        outputs = tf.nest.map_structure(tf.identity, keras_model.call_model(model, inputs, training=True))
        sources = [_in_pieces(one, num_pieces) for one in tf.nest.flatten(outputs)]
    structure = tf.nest.map_structure(lambda output: None, outputs)
    del outputs  # the pieces are copies
    gathers = False

    def loss_of(sources: Sequence[Sequence[tf.Tensor]]) -> Any:
        nonlocal gathers
        with tf.device(device), tf.GradientTape() as tape, gathered_classes.read_in_pieces():
            tape.watch(sources)
            whole = [one[0] if num_pieces == 1 else gathered(one, -1, [device] * num_pieces) for one in sources]
            predicted = tf.nest.pack_sequence_as(structure, whole)
            loss = keras_model.compute_loss(model, inputs, targets, predicted, sample_weight, training=True)
        if num_pieces > 1:
            needed = needed_operations(loss.graph.get_operations(), [loss])
            gathers = any(one.op in needed for one in whole)
        return [one for one in tape.gradient(loss, tf.nest.flatten(sources)) if one is not None]

    run = tf.function(loss_of, autograph=False)
    run.get_concrete_function(sources)
    if gathers:
        return None
    seconds = _seconds_of_call(run, sources)
    return max(0.0, seconds - _seconds_of_call(tf.function(tf.identity, autograph=False), tf.zeros([])))


def _in_pieces(output: Any, num_pieces: int) -> list[Any]:
    """Return an output in pieces of its last axis, whose sizes differ by at most one column."""
    if num_pieces == 1:
        return [output]
    columns = int(output.shape[-1])
    return list(tf.split(output, [len(range(index, columns, num_pieces)) for index in range(num_pieces)], -1))


def _seconds_of_call(run: Callable[[Any], Any], argument: Any) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        began_seconds = time.perf_counter()
        run(argument)
        wait_for_gpus()
        seconds.append(time.perf_counter() - began_seconds)
    return statistics.median(seconds[1:])

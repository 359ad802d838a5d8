"""Measure some training steps of one layout in this process, and collect the facts of a model."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import cluster, data
from tfpar._compat.random_numbers import random_state
from tfpar.full_precision import full_precision
from tfpar.job import UserMessage
from tfpar.loops import memory_errors
from tfpar.loops.step_functions import StepFunctions
from tfpar.messages import user_warnings
from tfpar.messages.reasons import message_of
from tfpar.pipeline.graph import tracing
from tfpar.pipeline.partition.layer_profile import wait_for_gpus
from tfpar.placement.owners import num_bytes
from tfpar.planning.first_batches import FirstBatches
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Measured
from tfpar.planning.search import OUT_OF_MEMORY, Failed
from tfpar.sharding.offers import sharding_of
from tfpar.strategies import SingleDevice, Strategy
from tfpar.study.known_layers import check_synchronized, normalizing
from tfpar.study.observation import Mode
from tfpar.study.outputs import Words, study_outputs
from tfpar.trainer import Trainer

LAP_SECONDS, ALL_LAPS_SECONDS = 0.2, 2.0
_LEAST_LAPS, _MOST_LAPS = 3, 9
# The plan shows the reason, and measures other layouts.
_WORDS = Words(alone="train it without stages", mixing="train it without stages")

MakeTrainer = Callable[[Strategy], tuple[Trainer, FirstBatches]]


class _Prepared(NamedTuple):
    """A trainer whose model is built, and its data."""

    trainer: Trainer
    batch: Any
    batches: FirstBatches


def measure(make_trainer: MakeTrainer, make_strategy: Callable[[], Strategy]) -> Measured | Failed:
    """Train a layout for some steps on one batch, in the compiled loop of `fit`, and drop the model.

    Args:
        make_trainer: Returns a trainer under a strategy, and its data.
        make_strategy: Returns the strategy of the layout.
    """
    gc.collect()  # the models of earlier layouts
    try:
        with user_warnings.suppressed(), as_python_errors():
            strategy = make_strategy()  # may have to come before TensorFlow starts
            with random_state.preserved_random_state():
                peaks = _Peaks()
                return _measured(_prepared(make_trainer, strategy), peaks)
    except MemoryError:
        return Failed(OUT_OF_MEMORY)
    except ValueError as error:
        return Failed(message_of(error), is_refusal=True)


def measure_one_device(
    make_trainer: MakeTrainer, device: str, explain: UserMessage = lambda error: None
) -> tuple[ModelFacts, Measured | Failed]:
    """Return the facts of a model, and its measured step on one device.

    Args:
        make_trainer: As for `measure`.
        device: The device.
        explain: Explains TensorFlow's errors in the data in a sentence; returns None for other errors.

    Raises:
        ValueError: If model and data do not fit together, or one device cannot train the model.
        MemoryError: If the weights do not fit into host memory.
    """
    with random_state.preserved_random_state():
        try:
            with as_python_errors(explain):
                peaks = _Peaks()
                prepared = _prepared(make_trainer, SingleDevice(device))
                facts = _facts(prepared, device)
                return facts, _measured(prepared, peaks)
        except MemoryError:
            gc.collect()  # one device may be too small for the weights, but the plan needs their facts
            with as_python_errors(explain):
                return _facts(_prepared(make_trainer, SingleDevice("CPU:0")), "CPU:0"), Failed(OUT_OF_MEMORY)


@contextlib.contextmanager
def as_python_errors(explain: UserMessage = lambda error: None) -> Iterator[None]:
    """Convert errors of TensorFlow to Python errors of one sentence.

    Args:
        explain: As for `measure_one_device`.

    Raises:
        MemoryError: If a device ran out of memory.
        ValueError: For other errors of TensorFlow.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise MemoryError(memory_errors.explain(error) or data.cause_of(error)) from error
    except tf.errors.OpError as error:
        raise ValueError(explain(error) or data.cause_of(error)) from error


def _prepared(make_trainer: MakeTrainer, strategy: Strategy) -> _Prepared:
    trainer, batches = make_trainer(strategy)
    return _Prepared(trainer, trainer.build(batches.first), batches)


def _measured(prepared: _Prepared, peaks: _Peaks) -> Measured:
    trainer, strategy = prepared.trainer, prepared.trainer.strategy
    distributed = strategy.engine.distribute(prepared.batches.first.cache().repeat().prefetch(2))
    loop = StepFunctions(trainer.model, strategy.engine, getattr(trainer, "fused", True)).loop("train", distributed)
    iterator = iter(data.without_autotuning(distributed.dataset))
    upcoming = iterator.get_next_as_optional()

    def run(num_steps: int) -> float:
        nonlocal upcoming
        began_seconds = time.perf_counter()
        result = loop(iterator, upcoming, num_steps)
        result.num_steps.numpy()
        upcoming = result.upcoming
        wait_for_gpus()
        return time.perf_counter() - began_seconds

    run(1)  # compiles
    peaks.restart()
    return Measured(_laps(run, strategy), peaks.most_bytes())


def _laps(run: Callable[[int], float], strategy: Strategy) -> tuple[float, ...]:
    """Return the mean seconds per step of several laps, of equally many steps on all workers."""
    run(1)  # the first step is slower
    seconds = run(1)
    (seconds,) = strategy.job.sum([seconds if strategy.is_chief else 0.0])
    num_steps = max(1, round(LAP_SECONDS / seconds))
    num_laps = round(ALL_LAPS_SECONDS / (num_steps * seconds))
    return tuple(run(num_steps) / num_steps for _ in range(min(_MOST_LAPS, max(_LEAST_LAPS, num_laps))))


class _Peaks:
    """Peak memory of each GPU, or of all logical CPUs, which share an allocator.

    Memory that is already in use, such as for other models of the program, does not count.
    """

    def __init__(self) -> None:
        names = cluster.configured_devices(None)  # of this process alone
        self._names = names if names[0].startswith("GPU") else ["CPU:0"]
        self._before_bytes = dict.fromkeys(self._names, 0)
        self._is_counted = self.restart()
        if self._is_counted:
            self._before_bytes = {name: _memory(name)["current"] for name in self._names}

    def restart(self) -> bool:
        """Restart the count; return False if TensorFlow does not count the bytes of these devices."""
        try:
            for name in self._names:
                tf.config.experimental.reset_memory_stats(name)
        except ValueError:
            return False
        return True

    def most_bytes(self) -> int | None:
        """Return the highest peak; None if it is not counted."""
        if not self._is_counted:
            return None
        most_bytes = max(_memory(name)["peak"] - before for name, before in self._before_bytes.items())
        return most_bytes or None  # on a CPU TensorFlow counts large tensors only


def _memory(device: str) -> dict[str, int]:
    counts: dict[str, int] = tf.config.experimental.get_memory_info(device)
    return counts


def _facts(prepared: _Prepared, device: str) -> ModelFacts:
    model, batch = prepared.trainer.model, prepared.batch
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    graph, normalizing, uncut = None, tuple[str, ...](), ""
    try:
        graph, normalizing = _traced(model, batch, device)
    except (ValueError, TypeError, NotImplementedError) as error:
        uncut = message_of(error).splitlines()[0].rstrip(".")
    return ModelFacts(
        name=model.name,
        num_parameters=model.count_params(),
        batch=int(data.num_rows(batch)),
        weight_bytes=sum(map(num_bytes, model.variables)),
        variable_bytes=tuple(map(num_bytes, model.trainable_variables)),
        slot_bytes=sum(map(num_bytes, model.optimizer.variables)),
        num_blocks=0 if graph is None else len(graph.calls),
        uncut=uncut,
        divides_layers=graph is not None and _divides_layers(model, graph),
        normalizing=normalizing,
        wait_seconds=prepared.batches.wait_seconds,
    )


def _traced(model: keras.Model, batch: Any, device: str) -> tuple[tracing.Graph, tuple[str, ...]]:
    """Return the graph of a model, if it can be cut, and the names of the layers that normalize each micro-batch."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with random_state.stand_in_generator():
        graph = tracing.trace(model, inputs)
    with tf.device(device), full_precision():
        check_synchronized(model, _WORDS.mixing)
        study_outputs(model, batch, Mode(training=True, gathers=False), _WORDS, is_known=True)
        return graph, tuple(normalizing(model, training=True))


def _divides_layers(model: keras.Model, graph: tracing.Graph) -> bool:
    try:
        return any(rule is not None for rule in sharding_of(model, graph, 2, None).rules)
    except (ValueError, TypeError):
        return False

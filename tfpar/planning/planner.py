"""The planner: measure a model, predict every layout, and rank them. The function `tfpar.plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfpar import cluster, data
from tfpar.loops import memory_errors
from tfpar.messages.reasons import message_of
from tfpar.planning.comparison import compare, may_split
from tfpar.planning.given_data import MakeTrainer, ReadOnce
from tfpar.planning.history import history, machine_name
from tfpar.planning.layouts import Refusal
from tfpar.planning.measurement import measure, measure_layout, with_split_factor
from tfpar.planning.plan import Plan
from tfpar.planning.rows import PredictedStep
from tfpar.planning.stated import MOST_MEASURED, Stated, check_count
from tfpar.strategies import Strategy
from tfpar.trainer import Trainer

RUNS = Path("runs")  # the folder in which the train command writes runs
USUALLY_MEASURED = 3
_MOST_PARTS = 3  # inputs, targets, sample_weight
_SECONDS_TO_MEASURE = 45.0  # of planning, after which no further layout is measured unless a number is given


def plan(
    build_model: Callable[[], keras.Model],
    dataset: Any,
    *,
    batch_size: int | None = None,
    devices: Sequence[str] | None = None,
    num_devices: int | None = None,
    num_hosts: int = 1,
    memory_bytes: int | None = None,
    device_speed: float = 1.0,
    bandwidth: float | None = None,
    measured_layouts: int | None = None,
    seed: int | None = 0,
) -> Plan:
    """Measure a model on the devices that are there, and rank the layouts in which it could train.

    Each layout gives the result of one device, so the choice is one of time and memory only. Random states, and the
    models of the program, stay as they are: the model function is called for the measurement, and its models are
    dropped. Without GPUs, `tfpar.use_logical_cpus(n)` comes first, to plan for n devices.

    Args:
        build_model: The model function: it returns a compiled `keras.Model`.
        dataset: What `Trainer.fit` takes: a dataset of the global batch, or a tuple of arrays `(inputs, targets)`. Up
            to seven batches of it are read; of a generator they are lost, so that `fit` needs a new one.
        batch_size: Global batch of arrays; None for 32.
        devices: Names of the devices to plan with; None for all GPUs, or else all logical CPUs.
        num_devices: Devices to plan for, if they are not those that are there; planned from these.
        num_hosts: Hosts to plan for, each with these devices.
        memory_bytes: Memory of a device; None for that of the devices that are there.
        device_speed: Speed of a planned device relative to those that are there: from 0.001 to 1000.
        bandwidth: Bytes per second between devices, and between hosts; None for that measured.
        measured_layouts: The largest number of layouts to train for a moment where predictions are too close to choose
            from; 0 to predict alone; None for 3, if that takes less than a minute.
        seed: The seed that is set before the model function runs, as that of `Trainer`.

    Returns:
        The plan, which prints as a table; a notebook shows it as one.

    Raises:
        TypeError: If `build_model` is no function that returns a model, or a number is none.
        ValueError: If a number is out of range, or the data has no examples.

    Example:
        >>> plan = tfpar.plan(build_model, dataset)
        >>> print(plan)
        >>> plan.rows[0].settings["kind"] in ("single_device", "mirrored", "pipeline", "hybrid", "tensor_parallel")
        True
    """
    if isinstance(build_model, keras.Model) or not callable(build_model):
        raise TypeError(
            f"build_model must be a function that returns a compiled keras.Model, received {build_model!r:.100}. The "
            "planner builds the model several times: pass the function that builds it."
        )
    stated = Stated(num_devices, num_hosts, memory_bytes, device_speed, bandwidth)
    arguments = dataset if isinstance(dataset, tuple) else (dataset,)
    if not 1 <= len(arguments) <= _MOST_PARTS:
        raise ValueError(
            "A tuple of arrays must be (inputs,), (inputs, targets) or (inputs, targets, sample_weight), received a "
            f"tuple of {len(arguments)}. Several inputs are a list or a dict, such as ([first, second], targets)."
        )
    batches = data.as_dataset(*arguments, batch_size=batch_size)

    def make_trainer(strategy: Strategy) -> tuple[Trainer, Any]:
        return Trainer(build_model, strategy, seed), batches

    return planned(make_trainer, devices, stated, measured_layouts)


def planned(
    make_trainer: MakeTrainer,
    devices: Sequence[str] | None,
    stated: Stated,
    measured_layouts: int | None = None,
    explain: data.UserMessage = lambda error: None,
) -> Plan:
    """Return the plan for the model and data of a trainer.

    Args:
        make_trainer: Returns a trainer under a strategy, and its training data.
        devices: Names of the devices to plan with; None for all GPUs, or else all logical CPUs.
        stated: The devices and links to plan for.
        measured_layouts: As for `plan`.
        explain: Returns a sentence about an error of TensorFlow in the data; None for another error.

    Raises:
        ValueError: As `plan`.
        MemoryError: As `plan`.
    """
    if measured_layouts is not None:
        check_count("measured_layouts", measured_layouts, 0, MOST_MEASURED)
    until_seconds = math.inf if measured_layouts is not None else time.perf_counter() + _SECONDS_TO_MEASURE
    names = cluster.resolve_devices(devices)
    trainers = ReadOnce(make_trainer)
    there = names if stated.num_devices is None else names[: stated.num_devices]
    free_bytes = cluster.free_bytes(there)  # before the measurement takes some of it
    with progress(f"planning: measuring the model on {', '.join(there)} ..."), _one_sentence(explain):
        model, machine = measure(trainers, there, stated.num_devices, stated.num_hosts)
    if machine.memory_bytes is None:
        machine = dataclasses.replace(machine, memory_bytes=free_bytes)
    machine = stated.applied(machine)
    if may_split(model, machine):
        with progress("planning: measuring split backward passes ..."), _one_sentence(explain):
            model = with_split_factor(trainers, there, model)
    most = USUALLY_MEASURED if measured_layouts is None else measured_layouts
    return compare(
        model,
        machine,
        history(RUNS, machine_name(machine.device)),
        devices,
        functools.partial(_measured, trainers, there, model.data_seconds, until_seconds),
        most if stated.keeps_speed else 0,  # measured here, a step would not be that of the stated devices
    )


def _measured(
    make_trainer: ReadOnce,
    devices: Sequence[str],
    data_seconds: float,
    until_seconds: float,
    step: PredictedStep,
) -> PredictedStep | Refusal | None:
    """Measure a layout, as `close_layouts.with_measured` calls it, before a moment of `time.perf_counter`."""
    if time.perf_counter() > until_seconds:
        return None
    try:
        with progress(f"planning: measuring {step.layout} ..."), _one_sentence():
            seconds, spread = measure_layout(make_trainer, step.layout, devices)
    except MemoryError:
        return dataclasses.replace(step, ran_out_of_memory=True)
    except ValueError as error:
        return Refusal(step.layout, message_of(error).rstrip("."))
    # Measured with data that is there, which takes cores to be read.
    seconds += step.waits.get("reading data", 0.0)
    return dataclasses.replace(step, measured_seconds=max(seconds, data_seconds), spread=spread)


@contextlib.contextmanager
def _one_sentence(explain: data.UserMessage = lambda error: None) -> Iterator[None]:
    """Raise an error of TensorFlow as one sentence."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise MemoryError(memory_errors.sentence_of(error) or data.cause_of(error)) from error
    except tf.errors.OpError as error:
        raise ValueError(explain(error) or data.cause_of(error)) from error


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a line on the terminal of standard error during this context; nothing where it is a file.

    Args:
        text: The line.
    """
    if not sys.stderr.isatty():
        yield
        return
    line = text[:79]
    print(line, end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        print(f"\r{' ' * len(line)}\r", end="", flush=True, file=sys.stderr)

"""The planner: measure a model, predict every layout, and rank them. The function `tfpar.plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfpar import cluster, data
from tfpar.planning.comparison import compare
from tfpar.planning.history import history, machine_name
from tfpar.planning.measurement import MakeTrainer, measure
from tfpar.planning.plan import Plan
from tfpar.planning.stated import Stated
from tfpar.strategies import Strategy
from tfpar.trainer import Trainer

RUNS = Path("runs")  # the folder in which the train command writes runs


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
    seed: int | None = 0,
) -> Plan:
    """Measure a model on the devices that are there, and rank the layouts in which it could train.

    Each layout gives the result of one device, so the choice is one of time and memory only. Random states, and the
    models of the program, stay as they are: the model function is called for the measurement, and its models are
    dropped. Without GPUs, `tfpar.use_logical_cpus(n)` comes first, to plan for n devices.

    Args:
        build_model: The model function: it returns a compiled `keras.Model`.
        dataset: What `Trainer.fit` takes: a dataset of the global batch, or a tuple of arrays `(inputs, targets)`.
        batch_size: Global batch of arrays; None for 32.
        devices: Names of the devices to plan with; None for all GPUs, or else all logical CPUs.
        num_devices: Devices to plan for, if they are not those that are there; planned from these.
        num_hosts: Hosts to plan for, each with these devices.
        memory_bytes: Memory of a device; None for that of the devices that are there.
        device_speed: Speed of a planned device relative to those that are there.
        bandwidth: Bytes per second between devices, and between hosts; None for that measured.
        seed: The seed that is set before the model function runs, as that of `Trainer`.

    Returns:
        The plan, which prints as a table; a notebook shows it as one.

    Raises:
        TypeError: If `build_model` is no function that returns a model, or a number is none.
        ValueError: If a number is out of range, or the data has no examples.

    Example:
        >>> plan = tfpar.plan(build_model, dataset)
        >>> print(plan)
        >>> plan.take.settings["kind"] in ("single_device", "mirrored", "pipeline", "hybrid", "tensor_parallel")
        True
    """
    if isinstance(build_model, keras.Model) or not callable(build_model):
        raise TypeError(
            f"build_model must be a function that returns a compiled keras.Model, received {build_model!r:.100}. The "
            "planner builds the model several times: pass the function that builds it."
        )
    stated = Stated(num_devices, num_hosts, memory_bytes, device_speed, bandwidth)
    arguments = dataset if isinstance(dataset, tuple) else (dataset,)
    batches = data.as_dataset(*arguments, batch_size=batch_size)

    def make_trainer(strategy: Strategy) -> tuple[Trainer, Any]:
        return Trainer(build_model, strategy, seed), batches

    return planned(make_trainer, devices, stated)


def planned(make_trainer: MakeTrainer, devices: Sequence[str] | None, stated: Stated) -> Plan:
    """Return the plan for the model and data of a trainer.

    Args:
        make_trainer: Returns a trainer under a strategy, and its training data.
        devices: Names of the devices to plan with; None for all GPUs, or else all logical CPUs.
        stated: The devices and links to plan for.

    Raises:
        ValueError: As `plan`.
    """
    names = cluster.resolve_devices(devices)
    there = names if stated.num_devices is None else names[: stated.num_devices]
    free_bytes = cluster.free_bytes(there)  # before the measurement takes some of it
    with progress(f"planning: measuring the model on {', '.join(there)} ..."):
        model, machine = measure(make_trainer, there, stated.num_devices)
    if machine.memory_bytes is None:
        machine = dataclasses.replace(machine, memory_bytes=free_bytes)
    return compare(model, stated.applied(machine), history(RUNS, machine_name(machine.device)), devices)


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

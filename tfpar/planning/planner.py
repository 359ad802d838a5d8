"""The function `tfpar.plan`: measure layouts on the devices of this process for a model function."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import cluster, config, data
from tfpar.cluster import tf_config
from tfpar.layout import Layout
from tfpar.planning import first_batches, step_measurement
from tfpar.planning.first_batches import FirstBatches
from tfpar.planning.plan import Devices, Measured, Plan
from tfpar.planning.progress import progress
from tfpar.planning.search import USUAL_BUDGET_SECONDS, Failed, Search, check_budget
from tfpar.strategies import Strategy, from_settings
from tfpar.trainer import Trainer

_MOST_PARTS = 3  # inputs, targets, sample_weight


def plan(
    build_model: Callable[[], keras.Model],
    dataset: Any,
    *,
    batch_size: int | None = None,
    devices: Sequence[str] | None = None,
    budget_seconds: float = USUAL_BUDGET_SECONDS,
    seed: int | None = 0,
    fused: bool = True,
) -> Plan:
    """Measure some training steps of each promising layout of the available devices, and rank the layouts.

    All layouts give the result of one device and differ only in time and memory. The model function is called for each
    layout, and its models are dropped; random states and other models of the program stay unchanged. Without GPUs, call
    `tfpar.use_logical_cpus(n)` first to plan for n devices.

    Args:
        build_model: The model function, which returns a compiled `keras.Model`.
        dataset: What `Trainer.fit` takes: a dataset of the global batch, or a tuple of arrays `(inputs, targets)`. Up
            to six batches are read. A generator loses them, so create a new one for `fit`.
        batch_size: Global batch size of arrays; None for 32.
        devices: Names of the devices to plan with; None for all GPUs, or else all logical CPUs.
        budget_seconds: Time limit: no measurement begins that would probably end later. One device and one layout of
            several devices are always measured.
        seed: As for `Trainer`: seed to set before the model function runs.
        fused: As for `Trainer`: whether steps use fused kernels.

    Returns:
        The plan; `print` and notebooks show it as a table.

    Raises:
        TypeError: If `build_model` is not a function that returns a model.
        ValueError: If the data has no examples, or one device cannot train the model.

    Example:
        >>> plan = tfpar.plan(build_model, dataset, budget_seconds=1)
        >>> print(plan)
        >>> plan.best.settings["kind"] in ("single_device", "mirrored", "pipeline", "hybrid", "tensor_parallel")
        True
    """
    began_seconds = time.perf_counter()
    if isinstance(build_model, keras.Model) or not callable(build_model):
        raise TypeError(
            f"build_model must be a function that returns a compiled keras.Model, received {build_model!r:.100}. Pass "
            "the function itself, because the planner builds the model several times."
        )
    _check_alone()
    check_budget("budget_seconds", budget_seconds)
    names = cluster.resolve_devices(devices)
    batches = data.as_dataset(*_arguments(dataset), batch_size=batch_size)
    with step_measurement.as_python_errors():
        first = first_batches.read(batches)

    def make_trainer(strategy: Strategy) -> tuple[Trainer, FirstBatches]:
        return Trainer(build_model, strategy, seed, fused=fused), first

    def settings_of(layout: Layout) -> dict[str, Any]:
        return layout.settings_on(names)

    def measure(layout: Layout) -> Measured | Failed:
        settings = config.with_layout(config.SingleDevice(), settings_of(layout))
        with progress(f"planning: measuring {layout} ..."):
            return step_measurement.measure(make_trainer, functools.partial(from_settings, settings))

    free_bytes = cluster.free_bytes(names)  # before measurements use some
    with progress("planning: measuring one device ..."):
        facts, on_one_device = step_measurement.measure_one_device(make_trainer, names[0])
    kind = tf.DeviceSpec.from_string(names[0]).device_type
    search = Search(measure, budget_seconds, began_seconds)
    return search.plan(facts, Devices(kind, len(names), memory_bytes=free_bytes), on_one_device, settings_of)


def _check_alone() -> None:
    job = tf_config.from_environment(os.environ)
    if job is not None and job.num_workers > 1:
        raise ValueError(
            f"tfpar.plan measures the devices of one process, but the environment describes a job of {job.num_workers} "
            f"workers. Run python -m tfpar.launch --num_workers {job.num_workers} -- -m tfpar.plan --config run.toml."
        )


def _arguments(dataset: Any) -> tuple[Any, ...]:
    arguments = dataset if isinstance(dataset, tuple) else (dataset,)
    if not 1 <= len(arguments) <= _MOST_PARTS:
        raise ValueError(
            "A tuple of arrays must be (inputs,), (inputs, targets) or (inputs, targets, sample_weight), received a "
            f"tuple of {len(arguments)}. Pass several inputs as a list or dict, such as ([first, second], targets)."
        )
    return arguments

"""The measurement of a user's own model, and of the devices that are there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import config, data
from tfpar._compat import random_state
from tfpar.cluster import cores
from tfpar.messages import user_warnings
from tfpar.pipeline.schedule.links import Link
from tfpar.planning.block_measurement import SHARDS_OF_TRIAL, measure_blocks, trace_model, with_bytes
from tfpar.planning.contention import are_alike, may_share_model, measure_slowdown
from tfpar.planning.costs import Curve, MachineCosts, ModelCosts
from tfpar.planning.factor_measurement import with_factors
from tfpar.planning.given_data import MakeTrainer, ReadOnce, prepared
from tfpar.planning.layouts import Layout, smallest_microbatch
from tfpar.planning.link_measurement import measure_addition, measure_copy, measure_exchange, measure_reduction
from tfpar.planning.memory_measurement import model_bytes, runtime_bytes
from tfpar.planning.pipeline_probe import action_seconds
from tfpar.planning.stage_measurement import measure_split_factor, measure_stages
from tfpar.planning.step_timing import TimedLoop, measure_drift, measure_loss, measure_loss_of_pieces, measure_steps
from tfpar.planning.update_measurement import measure_update
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies import Mirrored, SingleDevice, Strategy, batch_dependence, from_settings
from tfpar.trainer import Trainer

_MOST_POWER = 6  # the smallest part of a batch is a 64th of it
_MOST_DEVICES_AT_ONCE = 4
_LONG_SECONDS = 0.03  # of a step; above it, the half millisecond that a replica adds on a CPU is less than a sixtieth


def measure(
    make_trainer: MakeTrainer, devices: Sequence[str], num_planned: int | None = None, num_hosts: int = 1
) -> tuple[ModelCosts, MachineCosts]:
    """Measure a model and its data on one device, and what several devices do at once.

    Each device gets a model of its own, which is trained for the measurement and dropped; logical CPUs may share one.

    Args:
        make_trainer: Returns a trainer under a strategy and its training data, as for `Trainer.fit`.
        devices: The devices of this machine to plan with, such as `["GPU:0", "GPU:1"]`.
        num_planned: Devices of a host to plan for; None for those that are there.
        num_hosts: Hosts to plan for.

    Returns:
        The costs of the model, with no price of split backward passes yet, and of the machine.

    Raises:
        ValueError: If the data has no examples, or one device cannot train the model.
        MemoryError: If the smallest step does not fit in the memory of a device.
    """
    began_seconds = time.perf_counter()
    num_planned = num_planned or len(devices)
    taken_bytes = runtime_bytes(devices[0])
    make_trainer = ReadOnce(make_trainer)
    with random_state.preserved_random_state():
        trainer, loop, batch, given = prepared(make_trainer, SingleDevice(devices[0]))
        costs, steps = _measure_model(make_trainer, trainer, loop, batch, devices[0], num_planned, num_hosts)
        replica_seconds, replica_spread = _replica_seconds(make_trainer, devices, costs)
        costs = dataclasses.replace(
            costs,
            data_seconds=given.wait_seconds,
            data_core_seconds=given.core_seconds,
            replica_seconds=replica_seconds,
        )
        stages = measure_stages(make_trainer, devices, costs, num_planned)
        costs = dataclasses.replace(costs, staged=stages.seconds, split_factor=None)
        machine, machine_spread = _measure_machine(make_trainer, loop, batch, devices, num_planned, costs)
        # The first measurement and the last one are the same: what lies between them is as uncertain as their drift.
        drift = measure_drift(loop, steps)
        spread = max(costs.spread, replica_spread, stages.spread, machine_spread, drift)
    num_cores = cores.num_allowed_cores() if machine.device == "CPU" else 0
    machine = dataclasses.replace(
        machine,
        num_cores=num_cores,
        cores_of_device=min(num_cores, tf.config.threading.get_intra_op_parallelism_threads() or num_cores),
        runtime_bytes=taken_bytes,
        slowdown_of_stages=stages.slowdown_like(machine.slowdown),
    )
    return dataclasses.replace(costs, spread=spread, seconds=time.perf_counter() - began_seconds), machine


def with_split_factor(make_trainer: MakeTrainer, devices: Sequence[str], costs: ModelCosts) -> ModelCosts:
    """Return the costs of a model with the price of split backward passes.

    Args:
        make_trainer: As for `measure`.
        devices: The devices of this machine.
        costs: The costs of the model.
    """
    began_seconds = time.perf_counter()
    with random_state.preserved_random_state():
        factor = measure_split_factor(ReadOnce(make_trainer), devices, costs)
    seconds = costs.seconds + time.perf_counter() - began_seconds
    return dataclasses.replace(costs, split_factor=factor, seconds=seconds)


def measure_layout(make_trainer: MakeTrainer, layout: Layout, devices: Sequence[str]) -> tuple[float, float]:
    """Measure the training step of a layout, with a model that is dropped afterwards.

    Args:
        make_trainer: As for `measure`.
        layout: A layout of one host.
        devices: At least as many devices of this machine as it has.

    Returns:
        The seconds of a step at the global batch, with data that is there, and the spread of its repeats.

    Raises:
        ValueError: If the layout cannot train the model.
        MemoryError: If the step does not fit in the memory of a device.
    """
    with random_state.preserved_random_state(), user_warnings.in_trial():
        one = prepared(ReadOnce(make_trainer), strategy_of(layout, devices))
        steps, spread = measure_steps(one.loop, [int(data.num_rows(one.batch))])
    return steps.seconds[0], spread


def strategy_of(layout: Layout, devices: Sequence[str]) -> Strategy:
    """Return the strategy of a layout of one host, as the train command makes it.

    Args:
        layout: The layout.
        devices: At least as many devices as it has.

    Example:
        >>> strategy_of(Layout(num_replicas=1), ["CPU:0"]).device_names
        ['CPU:0']
    """
    return from_settings(config.with_layout(config.SingleDevice(), layout.settings_on(devices)))


def sizes_of(batch: int, num_devices: int) -> list[int]:
    """Return the numbers of examples to measure.

    Args:
        batch: Examples of the global batch.
        num_devices: Number of devices.

    Returns:
        The batch, halves of it as far as a micro-batch of a pipeline on all devices, the share of each device, and a
        small part, whose step is mostly the update.

    Example:
        >>> sizes_of(64, 2)
        [1, 4, 8, 16, 32, 64]
    """
    powers = [power for power in range(_MOST_POWER) if smallest_microbatch(batch, num_devices) <= batch >> power]
    halves = {-(-batch // (1 << power)) for power in [*powers, _MOST_POWER]}
    return sorted(halves | {-(-batch // num_devices)})


def _measure_model(
    make_trainer: ReadOnce,
    trainer: Trainer,
    loop: TimedLoop,
    batch: Any,
    device: str,
    num_planned: int,
    num_hosts: int,
) -> tuple[ModelCosts, Curve]:
    """Return the costs of the model, and the steps that were measured, with the update."""
    model, num_examples = trainer.model, int(data.num_rows(batch))
    sizes = sizes_of(num_examples, num_planned)
    steps, spread = measure_steps(loop, sizes)
    block_sizes = sorted({max(1, num_examples // (4 * num_planned)), -(-num_examples // num_planned)})
    traced = trace_model(model, device, batch)
    blocks = measure_blocks(model, traced, device, block_sizes)
    update_seconds = measure_update(make_trainer, model, loop, device, steps)
    pieces_seconds, share = None, -(-num_examples // num_planned)
    if blocks.divides_loss and num_planned > 1:
        pieces_seconds = measure_loss_of_pieces(model, device, data.take_rows(batch, 0, share), SHARDS_OF_TRIAL)
    held = model_bytes(model, batch, device)
    with_all = with_bytes(blocks.costs, traced, num_examples, device)
    if num_hosts > 1 and traced.graph is not None:
        with_all = with_factors(with_all, model, traced.graph, batch, device)
    costs = ModelCosts(
        name=model.name,
        num_parameters=model.count_params(),
        weight_bytes=held.weight_bytes,
        trainable_bytes=held.trainable_bytes,
        slot_bytes=held.slot_bytes,
        variable_bytes=tuple(map(num_bytes, model.trainable_variables)),
        batch=num_examples,
        compute=Curve(steps.sizes, tuple(max(0.0, one - update_seconds) for one in steps.seconds)),
        update_seconds=update_seconds,
        loss_seconds=measure_loss(model, device, batch) / num_examples,
        loss_of_pieces_seconds=None if pieces_seconds is None else pieces_seconds / share,
        input_bytes=_bytes_of(batch) // num_examples,
        target_bytes=_bytes_of(keras.utils.unpack_x_y_sample_weight(batch)[1:]) // num_examples,
        working=held.working,
        scratch=held.scratch,
        blocks=with_all,
        uncut=traced.reason,
        # A model that can be cut mixes no examples.
        mixing=() if traced.graph is not None else tuple(batch_dependence.find(model, batch)),
        normalizing=traced.normalizing,
        spread=spread,
    )
    return costs, steps


def _replica_seconds(make_trainer: ReadOnce, devices: Sequence[str], costs: ModelCosts) -> tuple[float, float]:
    """Return the seconds of a step on one replica beyond those of the same step on one device, and their spread."""
    num_examples = -(-costs.batch // len(devices))
    if len(devices) == 1 or (are_alike(devices) and costs.compute.at(num_examples) > _LONG_SECONDS):
        return 0.0, 0.0
    loop = prepared(make_trainer, Mirrored([devices[0]])).loop
    steps, spread = measure_steps(loop, [num_examples])
    return max(0.0, steps.seconds[0] - costs.compute.at(num_examples) - costs.update_seconds), spread


def _bytes_of(batch: Any) -> int:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return sum(int(tf.size(leaf)) * tf.as_dtype(leaf.dtype).size for leaf in leaves if leaf is not None)


def _measure_machine(
    make_trainer: ReadOnce, loop: TimedLoop, batch: Any, devices: Sequence[str], num_planned: int, costs: ModelCosts
) -> tuple[MachineCosts, float]:
    """Return the costs of the machine, and their spread, as far as it changes a step."""
    kind = tf.DeviceSpec.from_string(devices[0]).device_type
    if len(devices) == 1:
        return MachineCosts(kind, num_planned, 1, add=measure_addition(devices[0])), 0.0
    used = list(devices[:_MOST_DEVICES_AT_ONCE])
    share = -(-int(data.num_rows(batch)) // min(len(devices), num_planned))
    if may_share_model(used, costs, share):
        loops = [loop, *(loop.twin() for _ in used[1:])]
    else:
        loops = [loop, *(prepared(make_trainer, SingleDevice(device)).loop for device in used[1:])]
    for one in loops:
        one.resize(share)
    numbers = sorted({2, len(devices)})
    slowdown = measure_slowdown(loops)
    reductions = {number: measure_reduction(devices[:number]) for number in numbers}
    machine = MachineCosts(
        device=kind,
        num_devices=num_planned,
        num_measured=len(devices),
        slowdown=slowdown.of_number,
        copy=measure_copy(devices[:2]),
        add=measure_addition(devices[0]),
        reduce={number: link for number, (link, _) in reductions.items()},
        exchange={number: measure_exchange(devices[:number]) for number in numbers},
        action_seconds=action_seconds(tuple(devices[:2])),
    )
    step_seconds = costs.compute.at(share) + costs.update_seconds
    return machine, max(slowdown.spread, *(_part_of_sums(costs, *one, step_seconds) for one in reductions.values()))


def _part_of_sums(costs: ModelCosts, link: Link, spread: float, step_seconds: float) -> float:
    """Return the spread of a step by that of the sums of its gradients, which are a part of it."""
    sum_seconds = link.seconds(costs.trainable_bytes, len(costs.variable_bytes))
    return spread * sum_seconds / (sum_seconds + step_seconds)

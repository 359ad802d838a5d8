"""Data parallelism on the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import keras
import numpy as np
import tensorflow as tf

from tfpar import cluster, data
from tfpar._compat import tf_distribute
from tfpar.engines.optimizer_shards import LocalCommunicator, OptimizerShards
from tfpar.engines.replicas.replica_engine import ReplicaEngine, averaged_steps, described_shares
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.layout import Layout, OwnSteps, Shard, check_batch_shares, check_own_steps, check_shard, shares_of_replicas
from tfpar.messages import keyword_arguments
from tfpar.recomputation.choice import Recompute, check
from tfpar.reduction import replicas
from tfpar.strategies.base import Strategy
from tfpar.study.outputs import BatchDependentLayers, check_choice

AllReduce = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]

PACK_BYTES = 32 << 20


class Mirrored(Strategy):
    """Data parallelism on the devices of this machine, based on `tf.distribute.MirroredStrategy`.

    Every device has a replica of the model and computes its per-replica batch. The results are those of one device.

    Args:
        devices: Device names such as `["GPU:0", "GPU:1"]`, or the number of devices. None uses all GPUs or, on a
            machine without GPUs, all logical CPUs (see `tfpar.use_logical_cpus`).
        all_reduce: Algorithm that sums gradients. On GPUs: `"nccl"`, `"hierarchical_copy"`,
            `"reduction_to_one_device"`, or `"auto"`, which is NCCL if each replica has a physical GPU of its own, else
            `"reduction_to_one_device"`. On CPUs: always `"reduction_to_one_device"`.
        pack_bytes: Small gradients of the same type are sent together in packs of up to this many bytes. None means
            32 MiB with NCCL and hierarchical copies, and no packs with `"reduction_to_one_device"`.
        batch_dependent_layers: `"refuse"`: raise an error for layers whose output for an example depends on the other
            examples. `"gather"`: call such layers with the whole batch on every replica.
        shard: `"optimizer"`: shard the optimizer state over the replicas (ZeRO stages 1 and 2); each gradient is
            summed on one device, without NCCL, hierarchical copies or packs. `"weights"`: also shard weights and
            gradients (ZeRO stage 3, FSDP); `all_reduce`, `pack_bytes`, `batch_dependent_layers` and `batch_shares` must
            keep their defaults. None: replicate everything.
        batch_shares: Relative size of the per-replica batch of each device, such as `[3, 1]` for a device that is three
            times as fast as the other. None: equal sizes.
        own_steps: How replicas run a model's own `train_step`. `"exact"`: with the results of one device, or an error
            if the step has none in parts. `"average"`: each on its examples, and gradients are averaged, as under
            `tf.distribute`; a step that compares examples then gives other weights.
        recompute: True: keep only the inputs of layers for the backward pass, which computes them again: less memory
            for more time, with the same results. A list: only of the layers with these names, patterns or classes,
            such as `["block_*", keras.layers.MultiHeadAttention]`.

    Raises:
        TypeError: If `recompute` has the wrong type.
        ValueError: If a device does not exist or is named twice, GPUs and CPUs are mixed, the all-reduce does not
            run on the devices, `batch_shares` does not have a number of at least 1 for each device, or an argument
            has no effect with `shard`.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> strategy = tfpar.Mirrored()
        >>> strategy.num_replicas
        2
    """

    @keyword_arguments.named
    def __init__(
        self,
        devices: Sequence[str] | int | None = None,
        all_reduce: AllReduce = "auto",
        pack_bytes: int | None = None,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shard: Shard | None = None,
        batch_shares: Sequence[int] | None = None,
        own_steps: OwnSteps = "exact",
        recompute: Recompute = False,
    ) -> None:
        recompute = check(recompute)
        check_choice(batch_dependent_layers)
        check_shard(shard)
        check_batch_shares(batch_shares)
        check_own_steps(own_steps, batch_shares)
        names = _resolved(devices)
        if shard == "weights":
            # Imported here: most users of replicas do not need the engine of stages.
            from tfpar.engines.stages.block_engine import BlockEngine, check_without_effect

            check_without_effect("all_reduce", all_reduce, "auto")
            check_without_effect("pack_bytes", pack_bytes, None)
            check_without_effect("batch_dependent_layers", batch_dependent_layers, "refuse")
            check_without_effect("batch_shares", batch_shares, None)
            check_without_effect("own_steps", own_steps, "exact")
            layout = Layout(len(names), shard=shard, recompute=bool(recompute))
            super().__init__(layout, BlockEngine(names, recompute=recompute))
            return
        if pack_bytes is not None and pack_bytes < 1:
            raise ValueError(f"pack_bytes must be at least 1, received {pack_bytes}. Leave it out for the default.")
        if shard is not None:
            _check_sums_on_owners(all_reduce, pack_bytes)
        shares = shares_of_replicas(batch_shares, [1] * len(names))
        operations = _cross_device_ops(all_reduce, names)
        pack_bytes = default_pack_bytes(operations) if pack_bytes is None else pack_bytes
        mirrored = tf.distribute.MirroredStrategy(names, operations)
        shard = shard if len(names) > 1 else None
        layout = Layout(len(names), shard=shard, recompute=bool(recompute))
        engine = MirroredReplicas(mirrored, names, pack_bytes, batch_dependent_layers, shard, shares, recompute)
        engine.averages_own_steps = own_steps == "average"
        super().__init__(layout, engine)

    @classmethod
    def of(cls, strategy: tf.distribute.MirroredStrategy) -> Mirrored:
        """Wrap the `tf.distribute.MirroredStrategy` in whose scope a model was built."""
        mirrored = cls.__new__(cls)
        devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        names = [f"{device.device_type}:{device.device_index}" for device in devices]
        operations = _cross_device_ops("auto", names)
        is_used = tf_distribute.replace_default_all_reduce(strategy, operations)
        pack_bytes = default_pack_bytes(operations) if is_used else None
        Strategy.__init__(mirrored, Layout(len(names)), MirroredReplicas(strategy, names, pack_bytes))
        return mirrored

    def describe(self) -> str:
        """Return a one-line description of the replicas and their devices."""
        replicas = self.layout.describe(self.device_names)
        return f"Mirrored over {replicas}{described_shares(self.engine)}{averaged_steps(self.engine)}"


class MirroredReplicas(ReplicaEngine):
    """The engine of `Mirrored`, on a `tf.distribute.MirroredStrategy`.

    Args:
        strategy: The `tf.distribute` strategy.
        devices: Short names of its devices.
        pack_bytes: As for `ReplicaEngine`.
        batch_dependent_layers: As for `ReplicaEngine`.
        shard: `"optimizer"` to shard the optimizer state over the replicas; None to replicate it.
        shares: As for `ReplicaEngine`.
        recompute: As for `ReplicaEngine`.
    """

    _merges = chooses_xla = True

    def __init__(
        self,
        strategy: tf.distribute.MirroredStrategy,
        devices: Sequence[str],
        pack_bytes: int | None,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shard: Shard | None = None,
        shares: tuple[int, ...] | None = None,
        recompute: Recompute = False,
    ) -> None:
        self.devices = devices
        super().__init__(strategy, pack_bytes, batch_dependent_layers, shares, recompute)
        if shard is not None:
            self._shards = OptimizerShards(self.job, LocalCommunicator(), strategy.extended.worker_devices)

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch."""
        *batch, _ = batch
        outputs = self._runs_of(model).predict(model, batch, lambda outputs: outputs)
        # Joined on the host, as the outputs of all replicas may not fit on one device. If every replica computed the
        # whole batch, only the outputs of the first count.
        with tf.device(HOST):
            return data.take_rows(data.join_batches(outputs), 0, batch[3])


def _check_sums_on_owners(all_reduce: AllReduce, pack_bytes: int | None) -> None:
    unused = [f"all_reduce={all_reduce!r}"] if all_reduce in ("nccl", "hierarchical_copy") else []
    unused += [f"pack_bytes={pack_bytes}"] if pack_bytes is not None else []
    if unused:
        raise ValueError(
            "With shard='optimizer' each gradient is summed on the device of its weight's owner, and "
            f"{' and '.join(unused)} would have no effect. Leave {'it' if len(unused) == 1 else 'them'} out."
        )


def _resolved(devices: Sequence[str] | int | None) -> list[str]:
    number: int | None = None
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        devices, number = None, int(cast("int", devices))
    names = cluster.resolve_devices(cast("Sequence[str] | None", devices))
    if number is not None and names and not 1 <= number <= len(names):
        others = cluster.more_devices(max(1, number), names)
        raise ValueError(
            f"devices must be names, or a number from 1 to {len(names)}, received {number}. There are: {names}.{others}"
        )
    if not names:  # in a job, TensorFlow lists no device by a local name
        raise ValueError(
            "Mirrored trains in one process, and this process has joined a job of several workers. Use MultiWorker "
            "here, or Mirrored in another process."
        )
    cluster.check_one_kind("Mirrored", names)
    return names[:number]


def chosen_all_reduce(all_reduce: AllReduce, devices: Sequence[str], cards: Sequence[int]) -> AllReduce:
    """Resolve `all_reduce` to an algorithm that runs on the devices, never `"auto"`.

    TensorFlow 2.21 would choose collectives whose keys restart in every strategy, and the second model of a process
    would crash ("Shape mismatch in the collective instance").

    Args:
        all_reduce: The argument of the strategy.
        devices: Devices of the replicas.
        cards: Number of the physical GPU of each device.

    Raises:
        ValueError: If the all-reduce does not run on the devices.

    Example:
        >>> chosen_all_reduce("auto", ["GPU:0", "GPU:1"], [17, 29])
        'nccl'
    """
    if all_reduce not in ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"):
        raise ValueError(
            f"all_reduce must be 'auto', 'nccl', 'hierarchical_copy' or 'reduction_to_one_device', "
            f"received {all_reduce!r}."
        )
    on_gpus = all(device.startswith("GPU") for device in devices)
    if all_reduce in ("nccl", "hierarchical_copy") and not on_gpus:
        raise ValueError(
            f"all_reduce={all_reduce!r} needs GPUs, and the devices are {list(devices)}. Use 'auto' on CPUs."
        )
    num_cards = len(set(cards))
    if all_reduce == "nccl" and num_cards < len(devices):
        raise ValueError(
            f"all_reduce='nccl' needs a physical GPU for each replica, and {list(devices)} are logical devices of "
            f"{num_cards}. Use 'reduction_to_one_device', or one device of each GPU."
        )
    if all_reduce != "auto":
        return all_reduce
    return "nccl" if on_gpus and num_cards == len(devices) > 1 else "reduction_to_one_device"


def default_pack_bytes(operations: tf.distribute.CrossDeviceOps) -> int | None:
    """Return the default `pack_bytes` for an all-reduce; None for no packs."""
    return None if isinstance(operations, tf.distribute.ReductionToOneDevice) else PACK_BYTES


def _cross_device_ops(all_reduce: AllReduce, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps:
    """Return TensorFlow's all-reduce without its own packing.

    TensorFlow 2.21 concatenates all gradients into one pack, which must be of one type, doubles their memory and is
    complete only at the end of the backward pass.
    """
    chosen = chosen_all_reduce(all_reduce, devices, cluster.card_numbers(devices))
    if chosen == "nccl":
        return tf.distribute.NcclAllReduce(num_packs=0)
    if chosen == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs=0)
    return replicas.SUM_ON_ONE_DEVICE

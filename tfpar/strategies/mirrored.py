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
from tfpar.engines.replicas.replica_engine import ReplicaEngine
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.layout import Layout, Shard, check_shard
from tfpar.messages import keyword_arguments
from tfpar.reduction import replicas
from tfpar.strategies.base import Strategy
from tfpar.study.outputs import BatchDependentLayers, check_choice

AllReduce = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]

PACK_BYTES = 32 << 20


class Mirrored(Strategy):
    """Data parallelism on several devices of this machine, with `tf.distribute.MirroredStrategy`.

    Every device has a replica of the model and computes its per-replica batch. The results are those of one device.

    Args:
        devices: Device names such as `["GPU:0", "GPU:1"]`, or how many; None takes all GPUs, or, on a machine without
            one, all logical CPUs (see `tfpar.use_logical_cpus`).
        all_reduce: How gradients are summed. On GPUs `"nccl"`, `"hierarchical_copy"`, `"reduction_to_one_device"`,
            or `"auto"` for NCCL where each replica has a GPU of its own, else `"reduction_to_one_device"`. On CPUs
            always `"reduction_to_one_device"`.
        pack_bytes: Small gradients of one type are sent together in packs of up to this many bytes; None for 32 MiB
            with NCCL and hierarchical copies, and for no packs with `"reduction_to_one_device"`.
        batch_dependent_layers: `"refuse"` batch-dependent layers before the first step, or `"gather"` the batch:
            every replica calls such a layer with the whole batch.
        shard: `"optimizer"` divides the optimizer's state over the replicas (see
            `tfpar.engines.optimizer_shards`), which sums each gradient on one device, without NCCL, hierarchical
            copies or packs; `"weights"` also the weights and gradients (see
            `tfpar.engines.stages.block_engine`), without the three arguments before; None keeps all of it on each.

    Raises:
        ValueError: If a device does not exist or is named twice, GPUs and CPUs are mixed, the all-reduce does not
            run on the devices, or an argument has no effect with `shard`.

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
    ) -> None:
        check_choice(batch_dependent_layers)
        check_shard(shard)
        names = _resolved(devices)
        if shard == "weights":
            # A model in blocks runs on the other engine, which most users of replicas do not need.
            from tfpar.engines.stages.block_engine import BlockEngine, check_without_effect

            check_without_effect("all_reduce", all_reduce, "auto")
            check_without_effect("pack_bytes", pack_bytes, None)
            check_without_effect("batch_dependent_layers", batch_dependent_layers, "refuse")
            super().__init__(Layout(len(names), shard=shard), BlockEngine(names))
            return
        if pack_bytes is not None and pack_bytes < 1:
            raise ValueError(f"pack_bytes must be at least 1, received {pack_bytes}. Leave it out for the default.")
        if shard is not None:
            _check_sums_on_owners(all_reduce, pack_bytes)
        operations = _cross_device_ops(all_reduce, names)
        pack_bytes = default_pack_bytes(operations) if pack_bytes is None else pack_bytes
        mirrored = tf.distribute.MirroredStrategy(names, operations)
        layout = Layout(len(names), shard=shard if len(names) > 1 else None)
        super().__init__(layout, MirroredReplicas(mirrored, names, pack_bytes, batch_dependent_layers, layout.shard))

    @classmethod
    def of(cls, strategy: tf.distribute.MirroredStrategy) -> Mirrored:
        """Return the tfpar strategy for the `tf.distribute.MirroredStrategy` in whose scope a model was built."""
        mirrored = cls.__new__(cls)
        devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        names = [f"{device.device_type}:{device.device_index}" for device in devices]
        operations = _cross_device_ops("auto", names)
        is_used = tf_distribute.replace_default_all_reduce(strategy, operations)
        pack_bytes = default_pack_bytes(operations) if is_used else None
        Strategy.__init__(mirrored, Layout(len(names)), MirroredReplicas(strategy, names, pack_bytes))
        return mirrored

    def describe(self) -> str:
        """Return one line with the devices of the replicas."""
        return f"Mirrored over {self.layout.describe(self.device_names)}"


class MirroredReplicas(ReplicaEngine):
    """The replicas of a `tf.distribute.MirroredStrategy`.

    Args:
        strategy: The strategy.
        devices: Short names of its devices.
        pack_bytes: As for `ReplicaEngine`.
        batch_dependent_layers: As for `ReplicaEngine`.
        shard: What the replicas divide; None for nothing.
    """

    _merges = chooses_xla = True

    def __init__(
        self,
        strategy: tf.distribute.MirroredStrategy,
        devices: Sequence[str],
        pack_bytes: int | None,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shard: Shard | None = None,
    ) -> None:
        self.devices = devices
        super().__init__(strategy, pack_bytes, batch_dependent_layers)
        if shard is not None:
            self._shards = OptimizerShards(self.job, LocalCommunicator(), strategy.extended.worker_devices)

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch."""
        *batch, _ = batch
        outputs = self._runs_of(model).predict(model, batch, lambda outputs: outputs)
        # On the host, where they are returned: the outputs of all replicas need not fit on one device. If every replica
        # computed the whole batch, only the outputs of the first replica count.
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
    found = cluster.resolve_devices(cast("Sequence[str] | None", devices))
    if number is not None and found and not 1 <= number <= len(found):
        others = cluster.more_devices(max(1, number), found)
        raise ValueError(
            f"devices must be names, or a number from 1 to {len(found)}, received {number}. There are: {found}.{others}"
        )
    if not found:  # in a job TensorFlow lists no device by a local name
        raise ValueError(
            "Mirrored trains in one process, and this process has joined a job of several workers. Use MultiWorker "
            "here, or Mirrored in another process."
        )
    cluster.check_one_kind("Mirrored", found)
    return found[:number]


def chosen_all_reduce(all_reduce: AllReduce, devices: Sequence[str], cards: Sequence[int]) -> AllReduce:
    """Return the all-reduce for some devices, never `"auto"`.

    TensorFlow 2.21's own choice for GPUs, and for CPUs, are collectives whose keys begin again in every strategy: the
    second model of a process crashes ("Shape mismatch in the collective instance").

    Args:
        all_reduce: The argument of the strategy.
        devices: The devices of the replicas.
        cards: For each device, a number that only devices on the same physical GPU share.

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
    """Return the bytes of a pack of gradients: None for no packs, between CPUs and on one device."""
    return None if isinstance(operations, tf.distribute.ReductionToOneDevice) else PACK_BYTES


def _cross_device_ops(all_reduce: AllReduce, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps:
    """Return TensorFlow's operations, without packs of their own.

    TensorFlow 2.21 concatenates all gradients to one pack: of one type only, with twice their memory, and complete only
    at the end of the backward pass.
    """
    chosen = chosen_all_reduce(all_reduce, devices, cluster.card_numbers(devices))
    if chosen == "nccl":
        return tf.distribute.NcclAllReduce(num_packs=0)
    if chosen == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs=0)
    return replicas.SUM_ON_ONE_DEVICE

"""Replicas of a `TensorParallel`: what `Hybrid` makes of one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar.layout import check_shard
from tfpar.per_model import PerModel
from tfpar.reduction.gradient_addition import dense_parts
from tfpar.strategies.tensor_parallel import updates
from tfpar.strategies.tensor_parallel.strategy import TensorParallel, devices_of
from tfpar.strategies.tensor_parallel.table_copies import TableCopies, Tables, find_tables
from tfpar.strategies.traced_rows import may_look_up


class TensorParallelReplicas(TensorParallel):
    """Replicas of the devices of a `TensorParallel`, each with a part of every global batch; made by `Hybrid`.

    Args:
        strategy: The shards of each replica.
        num_replicas: Number of replicas.
        devices: Device names, those of the first replica first; None takes the first ones of this machine.
        shard: `"optimizer"` gives each divided weight, with its optimizer state, to one of the replicas; None gives
            all to the first.

    Raises:
        ValueError: If the devices do not fit, or there is no such `shard`.
    """

    def __init__(
        self,
        strategy: TensorParallel,
        num_replicas: int,
        devices: Sequence[str] | None,
        shard: Literal["optimizer"] | None = None,
    ) -> None:
        check_shard(shard, ("optimizer",))
        super().__init__(strategy.num_shards, strategy.rules)
        self._shard = shard
        self._take(devices_of(strategy.num_shards, num_replicas, devices))
        self._tables: PerModel[Tables] = PerModel()

    @property
    def _owners(self) -> list[list[str]]:
        """The devices of the shards of each replica that owns weights: all with `shard`, else the first."""
        return self._replicas if self._shard else super()._owners

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Refuse layers that use the whole batch, and find the lookups whose rows replicas must add.

        Raises:
            ValueError: If a layer uses the whole batch.
        """
        super().study(model, batch, kind)
        if kind == "train" and self.num_replicas > 1:
            self._tables.pop(model)
            if may_look_up(model, batch):
                self._tables[model] = find_tables(model, batch, functools.partial(self._gradients_of_one, model))

    def _gradients_of_one(
        self, model: keras.Model, batch: Any, copying: Callable[[tf.GradientTape], TableCopies] | None
    ) -> list[Any]:
        """Return the gradients of the outputs of the first replica with respect to all pieces."""
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        alone = self._divided[model]._replace(replicas=self._replicas[:1])
        with tf.GradientTape() as tape, tf.device(self.devices[0]):
            outputs = dense_parts(alone.call(inputs, True, copying(tape) if copying else None))
            total = [tf.reduce_sum(output) for output in outputs if output.dtype.is_floating]
        return updates.gradients(tape, total, model)

    def _copies(self, model: keras.Model, tape: tf.GradientTape) -> TableCopies | None:
        tables = self._tables.get(model)
        return None if tables is None else TableCopies(tables, tape)

    def describe(self) -> str:
        """Return one line with the devices of each replica."""
        grid = ", ".join(f"({' '.join(one.removeprefix('/device:') for one in devices)})" for devices in self._replicas)
        sharded = ", optimizer state sharded" if self._shard else ""
        return (
            f"Hybrid of {self.num_replicas} replicas of TensorParallel of {self.num_shards} shards on {grid}{sharded}"
        )


def replicas_of(
    pipeline: TensorParallel, num_replicas: int = 1, devices: Sequence[str] | None = None, *,
    shard: Literal["optimizer"] | None = None, **others: Any,
) -> TensorParallelReplicas:  # fmt: skip
    """Return the replicas of a `TensorParallel`; the arguments are those of `Hybrid`.

    Raises:
        ValueError: If the devices do not fit, there is no such `shard`, or an argument is one for pipelines.
    """
    if others:
        raise ValueError(
            f"{next(iter(others))} is an argument of Hybrid for pipelines over several workers, received with a "
            "TensorParallel, whose replicas are on one machine. Leave it out."
        )
    check_num_replicas(pipeline, num_replicas)
    return TensorParallelReplicas(pipeline, num_replicas, devices, shard)


def check_num_replicas(pipeline: Any, num_replicas: int) -> None:
    """Raise ValueError unless the number of replicas is one, and their devices are not given twice."""
    if not isinstance(num_replicas, int) or isinstance(num_replicas, bool) or num_replicas < 1:
        raise ValueError(f"num_replicas must be a whole number of at least 1, received {num_replicas!r}.")
    if pipeline.given_devices is not None and num_replicas > 1:
        raise ValueError(
            f"The devices of all replicas are an argument of Hybrid, received devices={pipeline.given_devices} of its "
            "first argument. Leave them out there, and give devices to Hybrid."
        )

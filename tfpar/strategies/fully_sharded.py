"""Sharded weights: each weight on one device, and copies of a block's weights on every device while they are in use.

    device 0   w0 of device 1 ─► F0   w1 ─► F1   …   w1 ─► B1   w0 ─► B0      F, B: a block forward and backward
    device 1   w0             ─► F0   w1 of device 0 ─► F1  …                 on the examples of this replica

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. The blocks of a model are its stages, all on
the device of a replica. The gradients of a block are summed on the devices of its weights, which hold the optimizer's
state and compute the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfpar import data
from tfpar._compat import keras_variables
from tfpar.messages.number_format import three_digits
from tfpar.pipeline import schedule as schedules
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies.preview import Preview, ReplicaRow, replicas_table
from tfpar.strategies.staged import Settings, Staged

_EXPLANATION = (
    'shard="weights" runs a model in blocks, as a pipeline with one micro-batch for each replica. {error} Or train '
    'with tfpar.Mirrored(shard="optimizer").'
)


class FullySharded(Staged):
    """Data parallelism on one machine with `shard="weights"`; see `tfpar.Mirrored`.

    Args:
        devices: The devices of the replicas.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> FullySharded(["CPU:0", "CPU:1"]).describe()
        'Mirrored over 2 replicas on CPU:0, CPU:1, weights sharded'
    """

    has_schedule = False

    def __init__(self, devices: Sequence[str]) -> None:
        settings = Settings("parameters", recompute=False, memory_limit_bytes=None, allow_batch_dependent_layers=False)
        schedule = schedules.on_one_device(1).replicated(len(devices))
        super().__init__(settings, schedule, devices, shards_weights=True)

    def describe(self) -> str:
        """Return one line with the devices of the replicas."""
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        return f"Mirrored over {replicas} on {', '.join(self.devices)}, weights sharded"

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of replicas, and their noun."""
        return self.num_replicas, "replica"

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return a preview of a step: a row for each device, with the weights that it holds and those of two blocks."""
        self._prepared(model)
        blocks = [sum(cost.weight_bytes for cost in costs) for costs in self._planner.partition_of(model).stage_costs]
        rows = tuple(self._row(model, device, batch, sum(sorted(blocks)[-2:])) for device in self.devices)
        copied_bytes = 2 * sum(map(num_bytes, model.variables)) * (self.num_replicas - 1) // self.num_replicas
        title = f"{self.describe()}, in {len(blocks)} block{'s' * (len(blocks) > 1)}"
        table = replicas_table(title, rows, self.num_replicas)
        weights = f"{three_digits(copied_bytes / 1e6)} MB of weights are copied to each device in every step"
        return Preview(f"{table}\n{weights}" if self.num_replicas > 1 else table, rows)

    def _row(self, model: keras.Model, device: str, batch: Any, block_bytes: int) -> ReplicaRow:
        def held(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
            return [variable for variable in variables if keras_variables.is_on(variable, f"/device:{device}")]

        gradient_bytes = sum(map(num_bytes, held(model.trainable_variables)))
        variables = [*held(model.variables), *held(model.optimizer.variables)]
        return ReplicaRow(
            device=device,
            num_examples=-(-int(data.num_rows(batch)) // self.num_replicas),
            num_parameters=sum(int(weight.value.shape.num_elements()) for weight in held(model.variables)),
            state_bytes=sum(map(num_bytes, variables)) + gradient_bytes + block_bytes,
            gradient_bytes=sum(map(num_bytes, model.trainable_variables)),
        )

    @contextlib.contextmanager
    def raising_on_all_workers(self, what: str | None = None) -> Iterator[None]:
        """Return a context in which an error about stages says what they are here."""
        with _explained():
            yield

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Return a context in which an error about stages says what they are here."""
        with _explained():
            yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "shard=" in text or not any(word in text for word in ("pipeline", "micro-batch", "stages")):
            raise
        raise ValueError(_EXPLANATION.format(error=text)) from error

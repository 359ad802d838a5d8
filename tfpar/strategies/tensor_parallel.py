"""Tensor parallelism: large layers divided over several devices, which compute them together."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfpar import cluster
from tfpar.cluster import tf_config
from tfpar.engines.stages.stage_engine import Settings, StageEngine
from tfpar.layout import Layout
from tfpar.messages import keyword_arguments
from tfpar.pipeline import schedule as schedules
from tfpar.sharding.rules import Rules, check_rules
from tfpar.strategies.base import Strategy
from tfpar.study.outputs import Words

# Advice for replicas, which compute only a part of the batch each.
_WORDS = Words("use TensorParallel without replicas", "use TensorParallel without replicas")


class TensorParallel(Strategy):
    """Tensor parallelism: layers divided over devices of this machine, with the results of one device.

        x ─┬─► x · A[:, :half] ─► gelu ─► · B[:half, :] ─┐        device 0
           └─► x · A[:, half:] ─► gelu ─► · B[half:, :] ─┴─ sum   device 1

    Each device holds a shard of each large weight, with its gradient and optimizer state, and computes its share of the
    layer for the whole batch. Dense and EinsumDense layers are divided in pairs, the first by columns and the second by
    rows, with one sum of activations per pair; attention is divided by heads, an Embedding by rows of its table, and
    convolutions by filters, then by input channels. All other layers run once, on the first device. Random numbers,
    states and losses are those of one device. A divided weight remains a single variable in `model.weights`,
    checkpoints and saved files.

    Args:
        num_shards: Number of devices to divide each layer over, at least 2. The sizes of shards may differ by one.
        layout: Sharding rules in the style of Keras' `LayoutMap`: a regular expression, searched in the paths of the
            weights, maps to a tuple with `"model"` at the divided axis and None at the others. None divides every layer
            it can with at least a thousandth of the model's bytes or multiplications, and smaller layers whose input is
            sharded.
        devices: Device names such as `["GPU:0", "GPU:1"]`; None uses the first devices of this machine.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a device does not exist, their number is not `num_shards`, or a rule is malformed.

    Example:
        >>> tfpar.use_logical_cpus(4)
        >>> strategy = tfpar.TensorParallel(num_shards=4)
        >>> trainer = tfpar.Trainer(build_model, strategy)
    """

    @keyword_arguments.named
    def __init__(self, num_shards: int, layout: Rules | None = None, devices: Sequence[str] | None = None) -> None:
        if not isinstance(num_shards, int) or isinstance(num_shards, bool) or num_shards < 2:
            raise ValueError(
                f"num_shards must be a whole number of at least 2, received {num_shards!r}. On one device, use "
                "SingleDevice()."
            )
        self.settings = Settings(
            num_shards=num_shards,
            layout=check_rules(layout),
            strategy="TensorParallel",
            words=_WORDS,
            has_schedule=False,
        )
        self.given_devices, self.schedule = devices, schedules.make("gpipe", 1, 1)
        engine = StageEngine(self.settings, self.schedule, _devices(num_shards, devices))
        super().__init__(Layout(num_shards=num_shards), engine)


def _devices(num_shards: int, devices: Sequence[str] | None) -> list[str]:
    # In a job, Hybrid takes this strategy and connects the workers, before TensorFlow may start.
    resolve = cluster.configured_devices if tf_config.has_other_workers(os.environ) else cluster.resolve_devices
    existing = resolve(devices)
    if devices is not None and len(existing) != num_shards:
        raise ValueError(
            f"TensorParallel needs one device for each shard, received num_shards={num_shards} and {len(existing)} "
            f"devices: {existing}. Name {num_shards} devices."
        )
    if len(existing) < num_shards:
        raise ValueError(
            f"num_shards={num_shards} needs {num_shards} devices, and there are {len(existing)}: {existing}. Use fewer "
            f"shards.{cluster.more_devices(num_shards, existing)}"
        )
    return existing[:num_shards]

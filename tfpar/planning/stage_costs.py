"""The blocks of each stage of a pipeline, as the strategy cuts the model. Pure Python."""

from __future__ import annotations

import functools
import itertools

from tfpar.pipeline.partition.balance import balance_layers
from tfpar.planning.costs import BlockCost, ModelCosts
from tfpar.planning.layouts import Layout


def stages_of(model: ModelCosts, layout: Layout, batch: int) -> list[tuple[BlockCost, ...]]:
    """Return the blocks of each stage of a pipeline, with the times of a micro-batch balanced.

    Args:
        model: The costs of the model, with at least as many blocks as stages.
        layout: A layout with a pipeline.
        batch: Examples of the global batch.

    Example:
        >>> from tfpar.planning.costs import Curve, Line
        >>> blocks = tuple(BlockCost(name, Line(0, 1), Line(0, 2), 8, 8) for name in "abcd")
        >>> model = ModelCosts("mlp", 8, 32, 32, 0, (8,) * 4, 4, Curve((4,), (48.0,)), 0.0, blocks=blocks)
        >>> [[block.name for block in stage] for stage in stages_of(model, Layout(1, 2, 4), 4)]
        [['a', 'b'], ['c', 'd']]
    """
    size = -(-batch // (layout.num_replicas * layout.num_microbatches))
    sizes = _sizes(model.blocks, layout.num_stages, size)
    ends = [0, *itertools.accumulate(sizes)]
    return [model.blocks[begin:end] for begin, end in itertools.pairwise(ends)]


@functools.lru_cache(maxsize=1024)
def _sizes(blocks: tuple[BlockCost, ...], num_stages: int, size: int) -> tuple[int, ...]:
    return tuple(
        balance_layers(
            [block.seconds(size) for block in blocks],
            num_stages,
            transfer_bytes=[block.cut.of(size) for block in blocks[:-1]],
            memory_bytes=[0] * len(blocks),
            memory_limit_bytes=None,
            num_devices=num_stages,
            names=[block.name for block in blocks],
        )
    )

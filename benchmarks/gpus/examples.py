"""Sizes and data of the experiments on GPUs, the same for every trainer; NumPy only, for PyTorch reads it too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.noise import noise

LEARNING_RATE = 0.01

# "resnet50": images of ImageNet's size
IMAGE_SHAPE, NUM_CLASSES = (224, 224, 3), 1000


class Transformer(NamedTuple):
    """The size of a stack of pre-norm blocks with full attention; the inputs are embeddings."""

    context: int
    width: int
    num_heads: int
    num_blocks: int


TRANSFORMERS = {
    "transformer": Transformer(512, 768, 12, 12),  # of the size of GPT-2
    "tiny": Transformer(8, 16, 2, 4),  # for parity, and for tests of the benchmark itself
}


def arrays(workload: str, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of noise: `[num_rows, ...]` each, of the same shape but for class labels.

    Args:
        workload: A name in `benchmarks.gpus.setting.Workload`.
        num_rows: Rows.

    Returns:
        float32 inputs and targets; the targets of "resnet50" are labels, `[num_rows]`.
    """
    if workload == "resnet50":
        return noise(num_rows, IMAGE_SHAPE, NUM_CLASSES)
    size = TRANSFORMERS[workload]
    return noise(num_rows, (size.context, size.width), None)

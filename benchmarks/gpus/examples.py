"""Sizes and data of the experiments on GPUs, the same for every trainer; NumPy only, for PyTorch reads it too."""

from __future__ import annotations

import numpy as np

from benchmarks.noise import noise

LEARNING_RATE = 0.01

# "resnet50": images of ImageNet's size
IMAGE_SHAPE, NUM_CLASSES = (224, 224, 3), 1000

# "transformer": 12 pre-norm blocks with full attention, of the size of GPT-2; the inputs are embeddings
CONTEXT, WIDTH, NUM_HEADS, NUM_BLOCKS = 512, 768, 12, 12

# "tiny": for tests of the benchmark itself
TINY_WIDTH = 8

_SHAPES = {"resnet50": IMAGE_SHAPE, "transformer": (CONTEXT, WIDTH), "tiny": (TINY_WIDTH,)}


def arrays(workload: str, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of noise: `[num_rows, ...]` each, of the same shape but for class labels.

    Args:
        workload: A name in `benchmarks.gpus.setting.Workload`.
        num_rows: Rows.

    Returns:
        float32 inputs and targets; the targets of "resnet50" are labels, `[num_rows]`.
    """
    return noise(num_rows, _SHAPES[workload], NUM_CLASSES if workload == "resnet50" else None)

"""Sizes and data of the pipeline experiments, the same for every trainer; NumPy only, for PyTorch reads it too."""

from __future__ import annotations

import numpy as np

from benchmarks.noise import noise

LEARNING_RATE = 0.01

# "mlp": [batch, 512] -> 8 x Dense(512, gelu)
MLP_WIDTH, NUM_LAYERS = 512, 8

# "transformer": [batch, 128, 256] -> 8 pre-norm blocks with full attention; the inputs are embeddings
CONTEXT, WIDTH, NUM_HEADS, HIDDEN_WIDTH, NUM_BLOCKS = 128, 256, 4, 1024, 8

# "wide": [batch, 16] -> 16 x (Dense(2048, gelu), Dense(16)): much to keep between forward and backward, little to
# compute, hardly any weights, and next to nothing that crosses from stage to stage or comes in
NARROW_WIDTH, WIDE_WIDTH, NUM_WIDE_LAYERS = 16, 2048, 16

# "resnet50": small images, so that the first step is TensorFlow's preparation and not arithmetic
IMAGE_SHAPE, NUM_CLASSES = (64, 64, 3), 1000

_SHAPES = {"mlp": (MLP_WIDTH,), "transformer": (CONTEXT, WIDTH), "wide": (NARROW_WIDTH,), "resnet50": IMAGE_SHAPE}


def arrays(workload: str, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of noise: `[num_rows, ...]` each, of the same shape but for class labels.

    Args:
        workload: A name in `benchmarks.pipelines.setting.Workload`.
        num_rows: Rows.

    Returns:
        float32 inputs and targets; the targets of "resnet50" are labels, `[num_rows]`.
    """
    return noise(num_rows, _SHAPES[workload], NUM_CLASSES if workload == "resnet50" else None)

"""Made-up data of the experiments; NumPy only, for PyTorch reads it too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def noise(num_rows: int, shape: Sequence[int], num_classes: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of noise.

    Args:
        num_rows: Rows.
        shape: The shape of an input.
        num_classes: The number of labels; None for targets like the inputs.

    Returns:
        float32 inputs `[num_rows, *shape]`, and targets of the same shape, or labels `[num_rows]`.
    """
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((num_rows, *shape), dtype="float32")
    if num_classes is not None:
        return inputs, rng.integers(0, num_classes, size=num_rows)
    return inputs, rng.standard_normal(inputs.shape, dtype="float32")

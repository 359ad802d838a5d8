"""The data that is timed, as arrays, the same for every trainer; NumPy only, for PyTorch's process reads it too."""

from __future__ import annotations

import numpy as np

NUM_FEATURES, NUM_CLASSES = 20, 10
IMAGE_SHAPE = (28, 28, 1)
WIDTH = 2048


def host_bound_arrays(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `([num_rows, 20], [num_rows, 1])` of a linear problem.

    Args:
        num_rows: Rows.
    """
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_rows, NUM_FEATURES)).astype("float32")
    return inputs, inputs @ rng.normal(size=(NUM_FEATURES, 1)).astype("float32")


def cnn_arrays(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `([num_rows, 28, 28, 1], [num_rows])` of noise with random labels.

    Args:
        num_rows: Images.
    """
    rng = np.random.default_rng(0)
    images = rng.random(size=(num_rows, *IMAGE_SHAPE), dtype="float32")
    return images, rng.integers(0, NUM_CLASSES, size=num_rows)


def dense_arrays(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `([num_rows, 2048], [num_rows, 2048])` of noise.

    Args:
        num_rows: Rows.
    """
    rng = np.random.default_rng(0)
    shape = (num_rows, WIDTH)
    return rng.random(size=shape, dtype="float32"), rng.random(size=shape, dtype="float32")


ARRAYS = {"host_bound": host_bound_arrays, "cnn": cnn_arrays, "dense": dense_arrays}

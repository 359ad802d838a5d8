"""The data that is timed, as arrays, the same for every trainer; NumPy only, for PyTorch's process reads it too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.noise import noise

NUM_FEATURES, NUM_CLASSES = 20, 10
IMAGE_SHAPE, SMALL_PHOTO_SHAPE, PHOTO_SHAPE = (28, 28, 1), (32, 32, 3), (96, 96, 3)
WIDTH = 2048
# "blocks": four pre-norm blocks with full attention; the inputs are embeddings
CONTEXT, BLOCK_WIDTH, NUM_HEADS, NUM_BLOCKS = 128, 256, 4, 4
VOCABULARY, EMBEDDING_WIDTH, NUM_TOKENS = 50_000, 64, 32
# "masked_mean", "weighted_mean": the next word of sentences that end in padding, which is word 0
NUM_WORDS, SENTENCE = 32_000, 128

Arrays = tuple[np.ndarray, ...]


def host_bound_arrays(num_rows: int) -> Arrays:
    """Return `([num_rows, 20], [num_rows, 1])` of a linear problem.

    Args:
        num_rows: Rows.
    """
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_rows, NUM_FEATURES)).astype("float32")
    return inputs, inputs @ rng.normal(size=(NUM_FEATURES, 1)).astype("float32")


def token_arrays(num_rows: int) -> Arrays:
    """Return `([num_rows, 32], [num_rows])` of random tokens with random labels.

    Args:
        num_rows: Rows.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, size=(num_rows, NUM_TOKENS), dtype="int32")
    return tokens, rng.integers(0, NUM_CLASSES, size=num_rows)


def sentence_arrays(num_rows: int) -> Arrays:
    """Return `([num_rows, 128], [num_rows, 128])` of words and of the next words, in sentences of unequal length.

    Args:
        num_rows: Sentences.
    """
    rng = np.random.default_rng(0)
    words = rng.integers(1, NUM_WORDS, size=(num_rows, SENTENCE + 1), dtype="int32")
    lengths = rng.integers(SENTENCE // 4, SENTENCE + 1, size=(num_rows, 1))
    words[np.arange(SENTENCE + 1) >= lengths] = 0
    return words[:, :-1], words[:, 1:]


def weighted_sentence_arrays(num_rows: int) -> Arrays:
    """Return the same with weights `[num_rows, 128]`, 0 for padding.

    Args:
        num_rows: Sentences.
    """
    words, targets = sentence_arrays(num_rows)
    return words, targets, (targets != 0).astype("float32")


# From a number of rows.
ARRAYS: dict[str, Callable[[int], Arrays]] = {
    "host_bound": host_bound_arrays,
    "cnn": lambda num_rows: noise(num_rows, IMAGE_SHAPE, NUM_CLASSES),
    "dense": lambda num_rows: noise(num_rows, (WIDTH,), None),
    "dense_adam": lambda num_rows: noise(num_rows, (WIDTH,), None),
    "resnet20": lambda num_rows: noise(num_rows, SMALL_PHOTO_SHAPE, NUM_CLASSES),
    "blocks": lambda num_rows: noise(num_rows, (CONTEXT, BLOCK_WIDTH), None),
    "embedding": token_arrays,
    "mobilenet": lambda num_rows: noise(num_rows, PHOTO_SHAPE, NUM_CLASSES),
    "masked_mean": sentence_arrays,
    "weighted_mean": weighted_sentence_arrays,
}

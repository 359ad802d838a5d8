"""The dataset of a loop, as its strategy distributes it."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Distributed(NamedTuple):
    """A dataset of elements for the steps of a strategy.

    Args:
        dataset: The elements.
        uneven_end: Whether workers may have different numbers of elements, and pad them with empty batches.
        unknown_end: Whether workers must have as many, and none knows how many: they end with the first of them.
    """

    dataset: tf.data.Dataset
    uneven_end: bool = False
    unknown_end: bool = False

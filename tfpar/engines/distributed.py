"""The dataset of a loop, as its engine distributes it, and how the loop reads an element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar import data


def _is_whole(element: Any) -> Any:
    return element


def _has_value(upcoming: tf.experimental.Optional) -> tf.Tensor:
    return upcoming.has_value()


@dataclasses.dataclass(frozen=True)
class Distributed:
    """A dataset of elements for the steps of an engine. By default each element is a whole global batch.

    Args:
        dataset: The elements.
        local_batch: Takes an element, and returns the examples that this worker computes.
        num_examples: Takes an element, and returns the size of the global batch, an int64 scalar; may communicate.
        has_more: Takes an `Optional`, and returns whether a step follows, a boolean scalar; may communicate.
        digest: Takes an element, and returns the `data.batch_digest` of its global batch; None for an element that no
            other worker reads.
        uneven_end: Whether workers may have different numbers of elements, and pad them with empty batches.
        unknown_end: Whether no worker knows how many elements there are: all end with the first that runs out.
    """

    dataset: tf.data.Dataset
    local_batch: Callable[[Any], Any] = _is_whole
    num_examples: Callable[[Any], tf.Tensor] = data.num_rows
    has_more: Callable[[tf.experimental.Optional], tf.Tensor] = _has_value
    digest: Callable[[Any], Any] = lambda element: None
    uneven_end: bool = False
    unknown_end: bool = False

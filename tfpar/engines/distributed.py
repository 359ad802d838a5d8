"""A dataset as an engine distributes it, and how a loop reads its elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar import data


@dataclasses.dataclass(frozen=True)
class Distributed:
    """A dataset with one element per step of an engine, by default the global batch.

    Args:
        dataset: The elements.
        local_batch: `(element) -> examples` that this worker computes.
        num_examples: `(element) -> size` of the global batch, an int64 scalar; may communicate.
        has_more: `(optional) -> bool`, whether another step follows; may communicate.
        digest: `(element) -> digest` of the global batch, from `data.batch_digest`; None if no other worker reads it.
        uneven_end: Whether workers may have different numbers of elements, padded with empty batches.
        unknown_end: Whether the number of elements is unknown; then all workers stop when the first runs out.
        spec: Specification of the examples, equal on all workers; None for that of the elements.
    """

    dataset: tf.data.Dataset
    local_batch: Callable[[Any], Any] = lambda element: element
    num_examples: Callable[[Any], tf.Tensor] = data.num_rows
    has_more: Callable[[tf.experimental.Optional], tf.Tensor] = lambda upcoming: upcoming.has_value()
    digest: Callable[[Any], Any] = lambda element: None
    uneven_end: bool = False
    unknown_end: bool = False
    spec: Any = None

"""The order of a step: updates wait for all that reads the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def after_reads(gradients: Sequence[Any], forward: Any, backward_reads: bool) -> list[Any]:
    """Return gradients that wait for the forward pass, so that no update comes before a read.

    TensorFlow 2.21's graph optimizer can drop the edge that keeps a read before an update where the gradient does not
    need what was read. Where the backward pass reads again, the updates wait for all gradients too; elsewhere it may
    overlap with updates, which two cores use.

    Args:
        gradients: Of the weights, None for a weight without one.
        forward: All that the forward pass gives.
        backward_reads: Whether the backward pass reads weights again.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    reads = (forward, present if backward_reads else ())
    with tf.control_dependencies(tf.nest.flatten(reads, expand_composites=True)):
        present = tf.nest.map_structure(tf.identity, present, expand_composites=True)
    after = iter(present)
    return [None if gradient is None else next(after) for gradient in gradients]

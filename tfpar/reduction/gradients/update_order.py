"""The order of a step: updates wait for all reads of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def after_reads(gradients: Sequence[Any], forward: Any, backward_reads: bool) -> list[Any]:
    """Return gradients that depend on the forward pass, so that no update precedes a read.

    TensorFlow 2.21's graph optimizer can remove the control edge from a read to an update if the gradient does not use
    the value that was read. If the backward pass reads weights again, updates wait for all gradients too; otherwise
    updates may overlap with the backward pass.

    Args:
        gradients: The gradients of the weights, None for a weight without one.
        forward: All results of the forward pass.
        backward_reads: Whether the backward pass reads weights again.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    reads = (forward, present if backward_reads else ())
    with tf.control_dependencies(tf.nest.flatten(reads, expand_composites=True)):
        present = tf.nest.map_structure(tf.identity, present, expand_composites=True)
    after = iter(present)
    return [None if gradient is None else next(after) for gradient in gradients]

"""The order of a step: updates wait for all reads of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def after_reads(gradients: Sequence[Any], forward: Any) -> list[Any]:
    """Return gradients that depend on the forward pass, so that no update precedes a read.

    TensorFlow 2.21's graph optimizer can remove the control edge from a read to an update if the gradient does not use
    the value that was read. Updates may overlap with the backward pass, which does not read weights again.

    Args:
        gradients: The gradients of the weights, None for a weight without one.
        forward: All results of the forward pass.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    with tf.control_dependencies(tf.nest.flatten(forward, expand_composites=True)):
        present = tf.nest.map_structure(tf.identity, present, expand_composites=True)
    after = iter(present)
    return [None if gradient is None else next(after) for gradient in gradients]

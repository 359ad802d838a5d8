"""Order between operations of a graph that exist already.

Written for TensorFlow 2.21. `tf.control_dependencies` orders operations only when they are created, and a
`tf.GradientTape` creates those of a backward pass all at once. `auto_control_deps` of TensorFlow uses the same method.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def run_before(first: tf.Operation, then: Sequence[tf.Operation]) -> None:
    """Run an operation before others of its graph, none of which it may depend on."""
    for op in then:
        op._add_control_inputs([first])

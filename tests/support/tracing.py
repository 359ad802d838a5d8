"""Cheaper tracing of functions in the processes of tests."""

from __future__ import annotations

import gc


def without_origins() -> None:
    """Stop TensorFlow 2.21 from recording the Python stack of each operation, which takes 7 % of a test's time.

    An error of an operation then lacks the lines that created it, which no test reads. The commands, scripts and jobs
    that tests start record them.
    """
    from tensorflow.python.framework import ops

    stack = ops.tf_stack.extract_stack()
    ops.tf_stack.extract_stack = lambda stacklevel=1: stack


def with_rare_collections() -> None:
    """Collect garbage rarely: traces create millions of objects, and Python's default takes 8 % of a test's time."""
    gc.set_threshold(50_000, 20, 20)

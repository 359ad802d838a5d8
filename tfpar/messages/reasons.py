"""The reason that an error of Keras or TensorFlow gives, without the lines and names that they add."""

from __future__ import annotations

import re

# What Keras 3.15 writes around the message of an error in a layer (keras/src/utils/traceback_utils.py).
_AROUND = re.compile(r"\AException encountered when calling .*?\n\n(.*?)(?:\n\nArguments received by .*)?\Z", re.DOTALL)
# What TensorFlow 2.21 writes around the message of an assertion (tensorflow/python/ops/control_flow_assert.py).
_ASSERTED = re.compile(r"Expected 'tf\.Tensor\(.*?\)' to be true\. Summarized data: b'(.*?)'")
_ADDED = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\].*")


def reason_of(error: Exception) -> str:
    r"""Return the first line of the message of an error, without the full stop.

    Args:
        error: An error that a layer or an operation raised.

    Example:
        >>> reason_of(ValueError("Exception encountered when calling Own.call().\n\n\x1b[1mToo large.\x1b[0m"))
        'Too large'
    """
    text = str(error)
    if found := _AROUND.match(text):
        text = found[1]
    lines = [_ASSERTED.sub(r"\1", _ADDED.sub("", line)).strip() for line in text.splitlines()]
    return next(filter(None, lines), type(error).__name__).removesuffix(".")

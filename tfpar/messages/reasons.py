"""The messages of Keras' and TensorFlow's errors, without what these add around the reason."""

from __future__ import annotations

import re

# What Keras 3.15 writes around the message of an error in a layer (keras/src/utils/traceback_utils.py).
_AROUND = re.compile(r"\AException encountered when calling .*?\n\n(.*?)(?:\n\nArguments received by .*)?\Z", re.DOTALL)
# What TensorFlow 2.21 writes around the message of an assertion (tensorflow/python/ops/control_flow_assert.py).
_ASSERTED = re.compile(r"Expected 'tf\.Tensor\(.*?\)' to be true\. Summarized data: b'(.*?)'")
_CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ADDED = re.compile(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\].*")


def message_of(error: BaseException) -> str:
    r"""Return the message of an error without terminal control sequences, as Keras 3.15 writes parts in bold.

    Example:
        >>> message_of(ValueError("\x1b[1mToo large.\x1b[0m"))
        'Too large.'
    """
    return without_control_sequences(str(error))


def without_control_sequences(text: str) -> str:
    """Return a text without terminal control sequences, such as colours."""
    return _CONTROL_SEQUENCES.sub("", text)


def reason_of(error: Exception) -> str:
    r"""Return the reason of an error of a layer or an operation, in one line without a full stop.

    Example:
        >>> reason_of(ValueError("Exception encountered when calling Own.call().\n\n\x1b[1mToo large.\x1b[0m"))
        'Too large'
    """
    text = message_of(error)
    if match := _AROUND.match(text):
        text = match[1]
    lines = [_ASSERTED.sub(r"\1", _ADDED.sub("", line)).strip() for line in text.splitlines()]
    return next(filter(None, lines), type(error).__name__).removesuffix(".")

"""The messages of errors of Keras and TensorFlow, and the reasons that they give, without what is added around them."""

from __future__ import annotations

import re

# What Keras 3.15 writes around the message of an error in a layer (keras/src/utils/traceback_utils.py).
_AROUND = re.compile(r"\AException encountered when calling .*?\n\n(.*?)(?:\n\nArguments received by .*)?\Z", re.DOTALL)
# What TensorFlow 2.21 writes around the message of an assertion (tensorflow/python/ops/control_flow_assert.py).
_ASSERTED = re.compile(r"Expected 'tf\.Tensor\(.*?\)' to be true\. Summarized data: b'(.*?)'")
_CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ADDED = re.compile(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\].*")


def message_of(error: BaseException) -> str:
    r"""Return the message of an error without control sequences of terminals: Keras 3.15 prints parts of it in bold.

    Args:
        error: Any error whose message is part of a text.

    Example:
        >>> message_of(ValueError("\x1b[1mToo large.\x1b[0m"))
        'Too large.'
    """
    return without_control_sequences(str(error))


def without_control_sequences(text: str) -> str:
    """Return a text without the control sequences of terminals, such as colours."""
    return _CONTROL_SEQUENCES.sub("", text)


def reason_of(error: Exception) -> str:
    r"""Return the first line of the message of an error, without the full stop.

    Args:
        error: An error that a layer or an operation raised.

    Example:
        >>> reason_of(ValueError("Exception encountered when calling Own.call().\n\n\x1b[1mToo large.\x1b[0m"))
        'Too large'
    """
    text = message_of(error)
    if found := _AROUND.match(text):
        text = found[1]
    lines = [_ASSERTED.sub(r"\1", _ADDED.sub("", line)).strip() for line in text.splitlines()]
    return next(filter(None, lines), type(error).__name__).removesuffix(".")

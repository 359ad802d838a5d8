"""A stream of bytes, split into lines."""

from __future__ import annotations

import re

_LONGEST_LINE_BYTES = 1 << 16  # longer lines are split, so that memory stays bounded
_END = re.compile(rb"(\r\n|\r|\n)")


class Lines:
    r"""Splits a stream of bytes into lines.

    A carriage return ends a line as well: progress bars use it to draw over their own line, which does not work for the
    lines of several workers.

    Example:
        >>> lines = Lines()
        >>> lines.feed(b"10%\r20%\rdone\nnext")
        [b'10%', b'20%', b'done']
        >>> lines.rest()
        [b'next']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the lines that are complete.

        Args:
            data: At least one byte.

        Returns:
            Lines without their ends. An empty one counts only if a newline ended it.
        """
        if self._returned:
            data = data.removeprefix(b"\n")  # the second half of "\r\n"
        self._returned = data.endswith(b"\r")
        # Text and ends in turn: text, end, text, end, text.
        *parts, self._rest = _END.split(self._rest + data)
        lines = [text for text, end in zip(parts[::2], parts[1::2], strict=True) if text or end != b"\r"]
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines += self.rest()
        return lines

    def rest(self) -> list[bytes]:
        """Return the bytes after the last line end as a line, if there are any, at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

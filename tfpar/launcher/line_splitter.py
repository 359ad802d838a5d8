"""A stream of bytes, cut into lines."""

from __future__ import annotations

import re

_LONGEST_LINE_BYTES = 1 << 16  # more without an end is passed on as it is, so that memory stays bounded
_END = re.compile(rb"(\r\n|\r|\n)")


class Lines:
    """Cuts a stream of bytes into lines.

    A carriage return ends a line as well: a progress bar draws over its own line with it, and the lines of several
    workers cannot be drawn over each other.

    Example:
        >>> lines = Lines()
        >>> lines.feed(b"10%\\r20%\\rdone\\nnext")
        [b'10%', b'20%', b'done']
        >>> lines.rest()
        [b'next']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read and return the lines that are complete.

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
        """Return what stands behind the last line end, as a line, if there is anything; the stream has ended."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

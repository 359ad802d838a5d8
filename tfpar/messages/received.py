"""Received values in error messages: shortened, on one line, without control characters.

Printing a whole value could fill the screen or raise an error: Python refuses integers of more than 4,300 digits.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = 80
PATH_COLUMNS = 120  # a path is useful only as a whole
MAX_SENTENCE = 300  # characters of an error message about one problem
MAX_PROBLEMS = 8  # shown for one input
_ITEMS, _LEVELS = 40, 6
_MAX_BITS = 256


def excerpt(text: str, columns: int = COLUMNS) -> str:
    r"""Return the first `columns` characters of a text on one line, with unprintable characters escaped.

    Example:
        >>> print(excerpt("two\nlines"), excerpt("0123456789", columns=6))
        two\nlines 012...
    """
    beginning = text[: columns + 1]
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in beginning)
    return shown if len(shown) <= columns else shown[: columns - 3] + "..."


def quoted(value: object, columns: int = COLUMNS) -> str:
    """Return the `repr` of a value, shortened to `columns` characters.

    Example:
        >>> quoted("node1"), quoted("x" * 1000)[-4:]
        ("'node1'", "...'")
    """
    if isinstance(value, str):
        whole = repr(value[: columns + 1])
        return whole if len(whole) <= columns and len(value) <= columns else f"{whole[: columns - 4]}...{whole[-1]}"
    return excerpt(_Repr().repr(value), columns)


def toml(value: object) -> str:
    """Return a value in TOML syntax, shortened; None becomes "none".

    Example:
        >>> toml(("GPU:0", True, 1.5, None))
        '["GPU:0", true, 1.5, "none"]'
    """
    text = json.dumps(_pruned(value, _LEVELS), default=str, ensure_ascii=False)
    return excerpt(text)


def path(name: str | os.PathLike[str], columns: int = PATH_COLUMNS) -> str:
    """Return a path, shortened at its beginning to `columns` characters.

    Example:
        >>> path("runs/digits")
        'runs/digits'
    """
    text = os.fspath(name)
    return excerpt(text, columns) if len(text) <= columns else "..." + excerpt(text[3 - columns :], columns - 3)


def listed(names: Iterable[str], columns: int = 2 * COLUMNS) -> str:
    """Return names, separated by commas, as many as fit into `columns` characters.

    Example:
        >>> listed(["one", "two", "three"], columns=12)
        'one, ...'
    """
    text = ", ".join(names)
    return text if len(text) <= columns else text[: columns - 5].rpartition(", ")[0] + ", ..."


def first_problems(problems: Sequence[str]) -> list[str]:
    """Return the first `MAX_PROBLEMS` sentences, and a sentence with the number of the others.

    Example:
        >>> first_problems(["a."] * 10)[-1]
        'There are 2 more problems.'
    """
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return list(problems)
    return [*problems[:MAX_PROBLEMS], f"There {'is' if more == 1 else 'are'} {more} more problem{'s' * (more > 1)}."]


def _pruned(value: Any, levels: int) -> Any:
    """Return enough of a value to fill a line, with large integers as text, for `json`."""
    if isinstance(value, str):
        return value[: COLUMNS + 1]
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return _large_integer(value)
    if isinstance(value, Mapping):
        kept = list(value.items())[:_ITEMS] if levels else []
        return {str(key)[:COLUMNS]: _pruned(item, levels - 1) for key, item in kept} if levels else "..."
    if isinstance(value, list | tuple):
        return [_pruned(item, levels - 1) for item in value[:_ITEMS]] if levels else "..."
    return "none" if value is None else value


def _large_integer(value: int) -> str:
    return f"{'-' * (value < 0)}0x{abs(value) >> max(0, value.bit_length() - 64):x}..."


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = COLUMNS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = _ITEMS
        self.maxlevel = _LEVELS

    def repr_int(self, value: int, level: int) -> str:
        return _large_integer(value) if value.bit_length() > _MAX_BITS else super().repr_int(value, level)

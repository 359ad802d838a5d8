"""The templates of the pages: all names of a run are text that nobody has checked, and Jinja escapes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page, left out without rows; the first cell of a row names it.

    Args:
        caption: Its title.
        heads: The names of its columns.
        rows: A text for each column.
        are_numbers: Whether the columns after the first are numbers.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    are_numbers: bool = True


def render(name: str, **values: Any) -> str:
    """Return a page.

    Args:
        name: The file of its template.
        values: What the template shows.

    Returns:
        One file of HTML without scripts, which loads nothing.

    Raises:
        jinja2.UndefinedError: If the template names a value that is not there.
    """
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("tfpar.reports", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: Any) -> Any:
    """Replace what no HTML file may contain: control characters, and halves of surrogate pairs."""
    if isinstance(value, Markup):
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in str(value)
    )

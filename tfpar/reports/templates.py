"""Rendering of the HTML templates. Jinja escapes all names of a run, which are untrusted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page, omitted if it has no rows. The first cell of each row is its heading.

    Args:
        caption: The title.
        heads: The column headings.
        rows: The cells of each row.
        are_numbers: Whether the columns after the first are numeric.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    are_numbers: bool = True


def render(name: str, **values: Any) -> str:
    """Render a template as a self-contained HTML page without scripts.

    Args:
        name: The file name of the template.
        **values: The values that it uses.

    Raises:
        jinja2.UndefinedError: If a value is missing.
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
    """Replace characters that are invalid in HTML: control characters and lone surrogates."""
    if isinstance(value, Markup):
        return value
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in str(value)
    )

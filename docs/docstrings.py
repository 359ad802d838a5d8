"""What mkdocstrings reads of docstrings: examples as code, whatever their heading."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleHeadings(griffe.Extension):
    """Give the examples of a docstring the one heading under which mkdocstrings reads them as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = with_headings(obj.docstring.value)


def with_headings(text: str) -> str:
    """Return a docstring with the heading `Examples:` for `Example:`, and above a paragraph that begins with `>>>`.

    Args:
        text: The docstring, without the indentation of its function.
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\n(?=\S)", text)
    return "\n\n".join(
        "Examples:\n" + re.sub(r"^", "    ", paragraph, flags=re.MULTILINE)
        if paragraph.startswith(">>> ")
        else paragraph
        for paragraph in paragraphs
    )

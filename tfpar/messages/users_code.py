"""The user's own code in tracebacks: files, lines and qualified names of functions."""

from __future__ import annotations

import ast
import functools
import signal
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

_PACKAGES = {"site-packages", "dist-packages"}
_LIBRARIES = {Path(signal.__file__).resolve().parent, Path(__file__).resolve().parents[1]}  # of Python, and tfpar


class Frame(Protocol):
    """A frame of a traceback of Python or TensorFlow."""

    @property
    def filename(self) -> str: ...  # noqa: D102
    @property
    def lineno(self) -> int | None: ...  # noqa: D102


class Place(NamedTuple):
    """A line of the user's own code.

    Attributes:
        file: The file, as named in the traceback.
        line: The line number, from 1.
        function: The qualified name of the function, such as "MyLayer.call"; empty outside of functions.
    """

    file: str
    line: int
    function: str


def last_place(frames: Iterable[Frame]) -> Place | None:
    """Return the last line of the user's own code in frames, oldest first; None if there is none."""
    users = [frame for frame in frames if is_users(frame.filename)]
    if not users:
        return None
    file, line = users[-1].filename, users[-1].lineno or 0
    return Place(file, line, function_at(file, line))


def users_place(error: BaseException) -> str:
    """Return the last line of the user's own code in the traceback of an error, as "file:line"; else an empty text."""
    if isinstance(error, SyntaxError) and is_users(error.filename or "<unknown>"):
        return f"{error.filename}:{error.lineno}"  # which has no frame in the traceback
    place = last_place(traceback.extract_tb(error.__traceback__))
    return "" if place is None else f"{place.file}:{place.line}"


def is_users(file: str) -> bool:
    """Return whether a file is the user's own, and not of tfpar, an installed package or Python."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    return _PACKAGES.isdisjoint(path.parts) and _LIBRARIES.isdisjoint(path.parents)


def function_at(file: str, line: int) -> str:
    """Return the qualified name of the innermost function around a line; empty outside of functions.

    Example:
        >>> import inspect
        >>> function_at(__file__, inspect.getsourcelines(function_at)[1] + 1)
        'function_at'
    """
    enclosing = [(first, name) for first, last, name in _functions(file) if first <= line <= last]
    return max(enclosing, default=(0, ""))[1]


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """Return the first line, the last line and the qualified name of each function of a file."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):  # a notebook, or a file that has changed
        return []
    functions: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                if not isinstance(child, ast.ClassDef):
                    functions.append((child.lineno, child.end_lineno or child.lineno, ".".join(inner)))
            visit(child, inner)

    visit(tree, ())
    return functions

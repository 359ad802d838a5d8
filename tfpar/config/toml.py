"""TOML to plain tables and back, with overrides; independent of the content of a run."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tfpar.config.toml_limits import MAX_BYTES, MAX_LEVELS, parse
from tfpar.messages import received
from tfpar.messages.received import excerpt
from tfpar.messages.suggestions import closest

Tables = dict[str, Any]
# A part of a dotted key, in quotes or without, and the dot or equals sign after it.
_PART = re.compile(r"""\s*+("(?:[^"\\]|\\.)*+"|'[^']*+'|[^\s."'=][^.=]*+)\s*+([.=])""")
show = received.toml


def read(path: str | Path) -> Tables:
    """Read a TOML file.

    Args:
        path: the file, in UTF-8.

    Returns:
        Its tables, as `tomllib` makes them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not valid TOML; the sentence names the line.
    """
    path = Path(path)
    name = f'"{received.path(path)}"'
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing there"
        near = closest(path.name, [other.name for other in path.parent.glob("*.toml")])
        way_out = f'did you mean "{path.with_name(near)}"?' if near else "check the path."
        raise FileNotFoundError(f"The configuration file {name} must exist, found {found}: {way_out}")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{name} must have at most {MAX_BYTES:,} bytes as a configuration, and it has more.")
    try:
        return parse(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{name}, line {line}, is not UTF-8 text: save the file as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(content.splitlines())}, the end of the file"
        problem = excerpt(str(error).replace("at end of document", end), received.PATH_COLUMNS)
        raise ValueError(f"{name} is not valid TOML: {problem}. Correct that line.") from None
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def override(tables: Tables, text: str, sections: Sequence[str]) -> None:
    """Set one value, given as `section.key=value`, or a whole section, as `section={key = value}`, in place.

    Args:
        tables: The tables to change.
        text: The assignment. A key with dots or equals signs has quotes, as in TOML. The value is read as TOML, or else
            as a string, so that names and paths need no quotes.
        sections: The names that contain keys and are not keys themselves.

    Raises:
        ValueError: there is no "=", no key or no value, or the key is a whole section and the value no table.

    >>> tables = {"model": {"name": "cnn"}}
    >>> override(tables, "model.name=linear", sections=["model"])
    >>> tables
    {'model': {'name': 'linear'}}
    >>> override(tables, "model={width = 64}", sections=["model"])
    >>> tables
    {'model': {'width': 64}}
    >>> override(tables, 'model."a.b"=1', sections=["model"])
    >>> tables
    {'model': {'width': 64, 'a.b': 1}}
    """
    parts, key, value = _divided(text)
    *parents, last = parts or [""]
    shown, name = excerpt(text), excerpt(key, received.COLUMNS // 2)
    if not all([*parents, last]):
        raise ValueError(f'An override must read section.key=value, received "{shown}": write training.epochs=3.')
    if len(parents) >= MAX_LEVELS:
        raise ValueError(f'An override must name a key at most {MAX_LEVELS} levels deep, received "{shown}".')
    if len(text) > MAX_BYTES or not _is_unicode(text):
        what = "is longer than a configuration may be" if len(text) > MAX_BYTES else "is not UTF-8 text"
        raise ValueError(f'The override "{shown}" {what}: correct it.')
    if not value:
        raise ValueError(
            f'The override "{shown}" has no value: write {name}=value, or {name}=none to unset what can be.'
        )
    parsed = _value(shown, value)
    if not parents and last in sections and not isinstance(parsed, dict):
        raise ValueError(f'The override "{shown}" names the whole section {name}: set its keys, {name}.key=value.')
    table = tables
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            below = excerpt(part, received.COLUMNS // 2)
            raise ValueError(f'The override "{shown}" goes below {below}, which is a value: set {below} itself.')
    table[last] = parsed


def _divided(text: str) -> tuple[list[str], str, str]:
    """Return the parts of the key of an assignment, the key as it is written, and the value; no parts without a key."""
    parts, end = list[str](), 0
    while found := _PART.match(text, end):
        part, end = found[1], found.end()
        parts.append(_unquoted(part) if part[0] in "\"'" else part.strip())
        if found[2] == "=":
            return parts, text[: end - 1].strip(), text[end:].strip()
    return [], text, ""


def _unquoted(part: str) -> str:
    """Return a key without its quotes; empty if it is not valid TOML."""
    try:
        return str(tomllib.loads(f"key = {part}")["key"])
    except tomllib.TOMLDecodeError:
        return ""


def _value(shown: str, value: str) -> Any:
    try:
        parsed = parse(f"value = {value}")
    except tomllib.TOMLDecodeError:
        if value[0] in "\"'[{":
            raise ValueError(
                f'The override "{shown}" opens a TOML value that is not valid: check {excerpt(value)}.'
            ) from None
        return value
    except ValueError as error:
        raise ValueError(f'The override "{shown}" {error}') from None
    return parsed["value"] if len(parsed) == 1 else value


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: an argument of a command line may hold other bytes."""
    return not any(0xD800 <= ord(one) <= 0xDFFF for one in text)


def write(tables: Mapping[str, Any]) -> str:
    """Write tables as TOML; None becomes the word "none".

    >>> print(write({"model": {"name": "cnn", "size": None}}), end="")
    [model]
    name = "cnn"
    size = "none"
    """
    return tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return "none" if value is None else value

"""Read TOML into plain tables and write it back, with overrides and within bounds of depth, size and time."""

import itertools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tfpar.messages import received
from tfpar.messages.received import excerpt
from tfpar.messages.suggestions import closest

Tables = dict[str, Any]
MAX_BYTES = 1 << 20  # of a configuration
MAX_LEVELS = 32  # of nested tables and lists
_INT64 = range(-(1 << 63), 1 << 63)  # the integers of TOML
# Strings and comments, in which a dot separates no keys.
_TEXTS = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|\'{3}.*?(?:\'{3}|\Z)|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+''',
    re.DOTALL,
)
# Python 3.11 takes quadratic time in the parts of a dotted key, so they are counted first.
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_LEVELS}}}", re.ASCII)
# A part of a dotted key, quoted or not, and the dot or equals sign after it.
_PART = re.compile(r"""\s*+("(?:[^"\\]|\\.)*+"|'[^']*+'|[^\s."'=][^.=]*+)\s*+([.=])""")
show = received.toml


def read(path: str | Path) -> Tables:
    """Read a TOML file in UTF-8.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not valid TOML; the message names the line.
    """
    path = Path(path)
    name = f'"{received.path(path)}"'
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "nothing there"
        near = closest(path.name, [other.name for other in path.parent.glob("*.toml")])
        way_out = f'did you mean "{path.with_name(near)}"?' if near else "check the path."
        raise FileNotFoundError(f"The configuration file {name} must exist, found {kind}: {way_out}")
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


def parse(text: str) -> dict[str, Any]:
    """Parse TOML that may be hostile.

    Returns:
        Tables at most `MAX_LEVELS` deep, with 64-bit integers and strings without null characters.

    Raises:
        tomllib.TOMLDecodeError: If it is not valid TOML.
        ValueError: If it exceeds these limits; the message is the end of a sentence.

    >>> parse("x = " + "[" * 9999)
    Traceback (most recent call last):
    ValueError: must have tables and lists at most 32 levels deep, and it has deeper ones: flatten them.
    """
    too_deep = f"must have tables and lists at most {MAX_LEVELS} levels deep, and it has deeper ones: flatten them."
    if _DEEP_KEY.search(_TEXTS.sub("text", text)):
        raise ValueError(too_deep)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError("must have integers of 64 bits, and it has one of thousands of digits: shorten it.") from None
    _check_limits(tables, too_deep)
    return tables


def _check_limits(tables: dict[str, Any], too_deep: str) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_LEVELS + 1):
        if not level:
            return
        for value in level:
            if isinstance(value, str) and "\0" in value:
                raise ValueError(
                    f"must have texts without null characters, and it has {received.toml(value)}: correct it."
                )
            if isinstance(value, int) and value not in _INT64:
                raise ValueError(
                    f"must have integers of 64 bits, and it has {received.toml(value)}: take a smaller one."
                )
        nested = [value for value in level if isinstance(value, dict | list)]
        level = list(itertools.chain(*(value.values() if isinstance(value, dict) else value for value in nested)))
    raise ValueError(too_deep)


def override(tables: Tables, text: str, sections: Sequence[str]) -> None:
    """Set a value (`section.key=value`) or a whole section (`section={key = value}`) in place.

    Args:
        tables: The tables to change.
        text: The assignment. Quote keys that contain dots or equals signs, as in TOML. A value that is not TOML is a
            string, so that names and paths need no quotes.
        sections: The names of the sections, which cannot be set to a single value.

    Raises:
        ValueError: If "=", the key or the value is missing, or a section is set to a value that is no table.

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
    parts, key, value = _split_assignment(text)
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


def _split_assignment(text: str) -> tuple[list[str], str, str]:
    """Return the parts of the key (none if there is no key), the key as written, and the value."""
    parts, end = list[str](), 0
    while match := _PART.match(text, end):
        part, end = match[1], match.end()
        parts.append(_unquoted(part) if part[0] in "\"'" else part.strip())
        if match[2] == "=":
            return parts, text[: end - 1].strip(), text[end:].strip()
    return [], text, ""


def _unquoted(part: str) -> str:
    """Return a key without its quotes; "" if it is not valid TOML."""
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
    """Return whether a text can be encoded as UTF-8: arguments of a command line may hold other bytes."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


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

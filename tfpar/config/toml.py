"""TOML to plain tables and back, overrides, and pydantic's errors as sentences; knows nothing of what a run is.

The words for what is allowed come from the JSON schema, so that no error text repeats a limit that may change.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from tfpar.config.toml_limits import MAX_BYTES, MAX_LEVELS, parse
from tfpar.messages import received
from tfpar.messages.received import MAX_PROBLEMS, excerpt
from tfpar.messages.suggestions import closest

Tables = dict[str, Any]
show = received.toml
_TYPE_WORDS = {
    "integer": "an integer",
    "number": "a finite number",
    "boolean": "true or false",
    "string": "a string",
    "array": "a list",
    "object": "a table",
}
_LIMIT_WORDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
    "multipleOf": "that is a multiple of",
    "minLength": "of length at least",
    "minItems": "of length at least",
    "maxLength": "of length at most",
    "maxItems": "of length at most",
}


class Schema(GenerateJsonSchema):
    """JSON schema in which the word "none" stands where Python has None, as TOML has no null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Replaces pydantic's `{"type": "null"}`."""
        return {"anyOf": [self.generate_inner(schema["schema"]), {"const": "none"}]}


def read(path: str | Path) -> Tables:
    """Reads a TOML file.

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
    """Sets one value, given as `section.key=value`, in place.

    Args:
        tables: what to change.
        text: the value is read as TOML; what is no TOML value is a string, so that names and paths need no quotes.
        sections: the names that hold keys and are no keys themselves.

    Raises:
        ValueError: there is no "=", no key or no value, or the key is a whole section.

    >>> tables = {"model": {"name": "cnn"}}
    >>> override(tables, "model.name=linear", sections=["model"])
    >>> tables
    {'model': {'name': 'linear'}}
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    *parents, last = key.split(".")
    shown, name = excerpt(text), excerpt(key, received.COLUMNS // 2)
    if not equals or not all([*parents, last]):
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
    if key in sections:
        raise ValueError(f'The override "{shown}" names the whole section {name}: set its keys, {name}.key=value.')
    table = tables
    for part in parents:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            below = excerpt(part, received.COLUMNS // 2)
            raise ValueError(f'The override "{shown}" goes below {below}, which is a value: set {below} itself.')
    table[last] = _value(shown, value)


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
    """Whether a text can be written as UTF-8: an argument of a command line may hold other bytes."""
    return not any(0xD800 <= ord(one) <= 0xDFFF for one in text)


def write(tables: Mapping[str, Any]) -> str:
    """Writes tables as TOML; None becomes the word "none".

    >>> print(write({"model": {"name": "cnn", "size": None}}), end="")
    [model]
    name = "cnn"
    size = "none"
    """
    return tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items()}
    return "none" if value is None else value


def sentences(error: ValidationError, tables: Tables, schema: Mapping[str, Any]) -> list[str]:
    """One sentence for each problem that pydantic found in `tables`.

    Args:
        error: what `model_validate(tables)` raised.
        tables: what was validated.
        schema: the JSON schema of the model, made with `Schema`.

    Returns:
        Sentences, each with the path of the key, the value received, what is allowed and the default.
    """
    # One problem of a union gives an error for each of its members: the same sentence, kept once.
    found: dict[str, None] = {}
    details = error.errors(include_url=False, include_input=False)
    for index, detail in enumerate(details):
        found |= dict.fromkeys(_lines(detail, tables, schema))
        if len(found) >= MAX_PROBLEMS and index + 1 < len(details):
            return [*list(found)[:MAX_PROBLEMS], "There are more problems: correct these first."]
    return received.first_problems(list(found))


def _lines(detail: ErrorDetails, tables: Tables, schema: Mapping[str, Any]) -> Iterator[str]:
    if detail["type"] == "value_error" and not detail["loc"]:
        yield from str(detail["ctx"]["error"]).splitlines()
        return
    path, value, node, parent = _locate(detail["loc"], tables, schema)
    name = excerpt(".".join(path), received.COLUMNS // 2)
    if detail["type"] == "extra_forbidden":
        allowed = parent.get("properties", {})
        near = _closest_key(path, allowed, schema)
        way_out = f"did you mean {near}?" if near else "rename or remove it."
        sentence = f"{name} = {show(value)} is not a known key: {way_out} Allowed here: "
        # A section of many keys does not fit into a sentence; the nearest is there already.
        yield sentence + received.listed(allowed, received.MAX_SENTENCE - len(sentence) - 1) + "."
    elif detail["type"] == "missing":
        yield f"{name} is missing: set it to {_allowed(node, schema)}."
    elif detail["type"] in ("value_error", "assertion_error"):  # a rule of a user's own model
        yield f"{name} = {show(value)} is refused: {excerpt(str(detail['ctx']['error']), 2 * received.COLUMNS)}"
    else:
        default = f" (default {show(node['default'])})" if not isinstance(node.get("default", {}), dict) else ""
        near = closest(value, _words(node, schema)) if isinstance(value, str) else None
        end = f': did you mean "{near}"?' if near else "."
        yield f"{name} = {show(value)} must be {_allowed(node, schema)}{default}{end}"


def keys(schema: Mapping[str, Any]) -> list[str]:
    """Every key that a TOML file can set, with its section: `seed`, `training.epochs`.

    Args:
        schema: the JSON schema of the model, made with `Schema`.
    """
    found = []
    for name, node in schema["properties"].items():
        inner = _resolve(node, schema).get("properties")
        found += [name] if inner is None else [f"{name}.{key}" for key in inner]
    return found


def closest_key(name: str, schema: Mapping[str, Any]) -> str | None:
    """The key of any section whose last part is nearest to `name`, with its section; None if none is near.

    Args:
        name: a word without a section, such as "lr".
        schema: the JSON schema of the model, made with `Schema`.
    """
    by_name: dict[str, str] = {}
    for key in keys(schema):
        by_name.setdefault(key.rpartition(".")[2], key)
    near = closest(name, by_name)
    return None if near is None else by_name[near]


def _closest_key(path: Sequence[str], allowed: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What an unknown key was meant to be: one of its section, or else one of another section."""
    elsewhere = closest_key(path[-1], schema)
    if elsewhere is not None and elsewhere.rpartition(".")[2] == path[-1]:
        return elsewhere
    near = closest(path[-1], allowed.keys())
    if near is None and len(path) > 1:  # a table of the section that takes any key, as optimizer.settings
        tables = (key for key, node in allowed.items() if _takes_any_key(node))
        near = next((f"{table}.{path[-1]}" for table in tables), None)
    return elsewhere if near is None else ".".join([*path[:-1], near])


def _takes_any_key(node: Mapping[str, Any]) -> bool:
    values = node.get("additionalProperties")  # false, true for values of any kind, or a schema of them
    return isinstance(values, Mapping) and "anyOf" in values


def _words(node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """The strings that a part of the schema accepts, where it names them."""
    node = _resolve(node, schema)
    return [word for member in node.get("anyOf", [node]) for word in member.get("enum", ()) if isinstance(word, str)]


def _locate(
    loc: Sequence[str | int], tables: Tables, schema: Mapping[str, Any]
) -> tuple[list[str], Any, Mapping[str, Any], Mapping[str, Any]]:
    """Follows pydantic's location as far as keys go: behind them it names members of unions and items of lists."""
    path: list[str] = []
    value: Any = tables
    node, parent = schema, schema
    for part in loc:
        table = _resolve(node, schema)
        if "properties" not in table and "additionalProperties" not in table:
            break
        path.append(str(part))
        value = value.get(part) if isinstance(value, dict) else value
        parent = table
        inner = table.get("properties", {}).get(part) or table.get("additionalProperties")
        node = inner if isinstance(inner, dict) else {}
    return path, value, node, parent


def _resolve(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _allowed(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Words for what a part of the schema accepts."""
    node = _resolve(node, schema)
    if "anyOf" in node:
        return " or ".join(_allowed(member, schema) for member in node["anyOf"])
    if "enum" in node:
        return f"one of {', '.join(show(value) for value in node['enum'])}"
    if "const" in node:
        return show(node["const"])
    limits = " and ".join(f"{words} {node[key]}" for key, words in _LIMIT_WORDS.items() if key in node)
    if "examples" in node:
        limits = f"such as {show(node['examples'][0])}"
    items = f", each {_allowed(node['items'], schema)}" if "items" in node else ""
    return f"{_TYPE_WORDS.get(node.get('type', ''), 'a valid value')} {limits}".rstrip() + items

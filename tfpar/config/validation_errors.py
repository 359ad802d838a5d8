"""Convert pydantic's errors to sentences: the key, the received value, the allowed values, the way out.

The allowed values are read from the JSON schema, so that no sentence repeats a limit that may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tfpar.config.json_schema import Node, closest_key, resolve, tables_by_kind
from tfpar.config.toml import Tables, show
from tfpar.messages import received
from tfpar.messages.received import MAX_PROBLEMS, excerpt
from tfpar.messages.suggestions import closest

_TYPE_WORDS = {
    "integer": "an integer",
    "number": "a finite number",
    "boolean": "true or false",
    "string": "a string",
    "array": "a list",
    "object": "a table",
}
_FORMAT_WORDS = {"import-path": "the path of a module and a name in it, with dots between them,"}
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


def sentences(error: ValidationError, tables: Tables, schema: Node) -> list[str]:
    """Return one sentence for each problem that pydantic found in `tables`.

    Args:
        error: The error of `model_validate(tables)`.
        tables: The validated tables.
        schema: The JSON schema of the model, made with `Schema`.
    """
    # A problem of a union gives the same sentence for each member; it is kept once.
    problems: dict[str, None] = {}
    details = error.errors(include_url=False, include_input=False)
    for index, detail in enumerate(details):
        problems |= dict.fromkeys(_lines(detail, tables, schema))
        if len(problems) >= MAX_PROBLEMS and index + 1 < len(details):
            return [*list(problems)[:MAX_PROBLEMS], "There are more problems: correct these first."]
    return received.first_problems(list(problems))


@dataclasses.dataclass
class _Place:
    """A place in the tables, with its schema and that of the enclosing table."""

    path: list[str]
    value: Any
    node: Node
    table: Node
    kind_key: str | None = None  # in a table of several kinds, the key that selects one, such as "strategy.kind"
    kind: Any = None
    tables_by_kind: dict[str, Node] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return excerpt(".".join(self.path), received.COLUMNS // 2)


def _lines(detail: ErrorDetails, tables: Tables, schema: Node) -> Iterator[str]:
    problem = detail["type"]
    if problem == "value_error" and not detail["loc"]:
        yield from str(detail["ctx"]["error"]).splitlines()
        return
    place = _locate(detail["loc"], tables, schema)
    if problem in ("union_tag_invalid", "union_tag_not_found") and "discriminator" in place.node:
        place = _place_of_kind(place, schema)
        problem = "missing" if place.value is None else problem
    if problem == "extra_forbidden":
        yield _unknown_key(place, schema)
    elif problem == "missing":
        needed = f', which {place.kind_key} = "{place.kind}" needs' if place.kind_key else ""
        yield f"{place.name} is missing{needed}: set it to {_allowed(place.node, schema)}."
    elif problem in ("value_error", "assertion_error"):  # a rule of a user's own model
        reason = excerpt(str(detail["ctx"]["error"]), 2 * received.COLUMNS)
        yield f"{place.name} = {show(place.value)} is refused: {reason}"
    else:
        yield _wrong_value(place, schema)


def _wrong_value(place: _Place, schema: Node) -> str:
    value, node = place.value, place.node
    default = f" (default {show(node['default'])})" if not isinstance(node.get("default", {}), dict) else ""
    near = closest(value, _words(node, schema)) if isinstance(value, str) else None
    end = f': did you mean "{near}"?' if near else "."
    return f"{place.name} = {show(value)} must be {_allowed(node, schema)}{default}{end}"


def _unknown_key(place: _Place, schema: Node) -> str:
    name = f"{place.name} = {show(place.value)}"
    owners = [f'"{kind}"' for kind, table in place.tables_by_kind.items() if place.path[-1] in table["properties"]]
    if owners:
        way_out = "set that kind" if len(owners) == 1 else "set one of these kinds"
        of_kinds = " or ".join(part for part in (", ".join(owners[:-1]), owners[-1]) if part)
        section, _, key = (place.kind_key or "").rpartition(".")
        leave, of_kind = "leave it out", place.tables_by_kind.get(place.kind, {})
        if place.kind != "auto" and set(of_kind.get("required", ())) <= {key}:
            leave += f""" (--set '{section}={{{key}="{place.kind}"}}' replaces the section)"""
        return (
            f"{name} is a setting of {place.kind_key} = {of_kinds}, received {show(place.kind)}: {leave}, or {way_out}."
        )
    allowed = place.table.get("properties", {})
    near = _closest_key(place.path, allowed, schema)
    way_out = f"did you mean {near}?" if near else "rename or remove it."
    sentence = f"{name} is not a known setting: {way_out} Allowed here: "
    # A section of many keys does not fit into a sentence; the nearest is there already.
    listed = received.listed(allowed, received.MAX_SENTENCE - len(sentence) - 1)
    return sentence + listed + "." * (not listed.endswith("..."))


def _closest_key(path: Sequence[str], allowed: Node, schema: Node) -> str | None:
    """Return the key that an unknown key probably means, in its section or in another."""
    elsewhere = closest_key(path[-1], schema)
    if elsewhere is not None and elsewhere.rpartition(".")[2] == path[-1]:
        return elsewhere
    near = closest(path[-1], allowed.keys())
    if near is None and len(path) > 1:  # the section may have a table that takes any key, as optimizer.settings
        tables = (key for key, node in allowed.items() if _takes_any_key(node))
        near = next((f"{table}.{path[-1]}" for table in tables), None)
    return elsewhere if near is None else ".".join([*path[:-1], near])


def _takes_any_key(node: Node) -> bool:
    values = node.get("additionalProperties")  # false, true for values of any kind, or a schema of them
    return isinstance(values, Mapping) and "anyOf" in values


def _words(node: Node, schema: Node) -> list[str]:
    """Return the strings that a node of the schema lists as allowed."""
    node = resolve(node, schema)
    return [word for member in node.get("anyOf", [node]) for word in member.get("enum", ()) if isinstance(word, str)]


def _locate(loc: Sequence[str | int], tables: Tables, schema: Node) -> _Place:
    """Follow pydantic's location through keys, up to members of unions and items of lists."""
    place = _Place([], tables, schema, schema)
    for part in loc:
        if "discriminator" in place.node:
            _choose_kind(place, str(part), schema)
            continue
        table = resolve(place.node, schema)
        if "properties" not in table and "additionalProperties" not in table:
            break
        value = place.value.get(part) if isinstance(place.value, dict) else place.value
        inner = table.get("properties", {}).get(part) or table.get("additionalProperties")
        node = inner if isinstance(inner, dict) else {}
        is_of_union = table in place.tables_by_kind.values()
        place.path.append(str(part))
        place.value, place.node, place.table = value, node, table
        if not is_of_union:
            place.kind_key, place.kind, place.tables_by_kind = None, None, {}
    return place


def _choose_kind(place: _Place, kind: str, schema: Node) -> None:
    """Replace a table of several kinds by that of one kind."""
    place.kind_key = f"{place.name}.{place.node['discriminator']['propertyName']}"
    place.kind, place.tables_by_kind = kind, tables_by_kind(place.node, schema)
    place.node = place.tables_by_kind.get(kind, {})


def _place_of_kind(place: _Place, schema: Node) -> _Place:
    """Return the place of the key that selects the kind of a table."""
    key, default = place.node["discriminator"]["propertyName"], place.node.get("default", {})
    node: dict[str, Any] = {"enum": list(tables_by_kind(place.node, schema))}
    if key in default:
        node["default"] = default[key]
    value = place.value.get(key) if isinstance(place.value, dict) else place.value
    return _Place([*place.path, key], value, node, place.table)


def _allowed(node: Node, schema: Node) -> str:
    """Describe the values that a node of the schema accepts."""
    node = resolve(node, schema)
    if "discriminator" in node:
        return _TYPE_WORDS["object"]
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
    words = _FORMAT_WORDS.get(node.get("format", "")) or _TYPE_WORDS.get(node.get("type", ""), "a valid value")
    return f"{words} {limits}".rstrip() + items

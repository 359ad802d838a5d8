"""The JSON schema of a pydantic model for TOML files, and searches in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from tfpar.messages.suggestions import closest

Node = Mapping[str, Any]


class Schema(GenerateJsonSchema):
    """JSON schema with the word "none" in place of null, which TOML lacks."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Replace pydantic's `{"type": "null"}`."""
        return {"anyOf": [self.generate_inner(schema["schema"]), {"const": "none"}]}


def settings(schema: Node) -> dict[str, Node]:
    """Return the schema of every setting of a TOML file, such as `seed` and `training.epochs`.

    If a section has several kinds, the settings of all kinds are returned.

    Args:
        schema: The schema of the whole file, made with `Schema`.
    """
    nodes: dict[str, Node] = {}
    for name, node in schema["properties"].items():
        tables = list(tables_by_kind(node, schema).values()) or [resolve(node, schema)]
        for table in tables:
            inner = table.get("properties")
            nodes |= {name: node} if inner is None else {f"{name}.{key}": value for key, value in inner.items()}
    return nodes


def closest_key(name: str, schema: Node) -> str | None:
    """Return the key whose last part is most similar to `name`, with its section; None if none is similar.

    Args:
        name: A word without a section, such as "lr".
        schema: The schema of the whole file, made with `Schema`.
    """
    by_name: dict[str, str] = {}
    for key in settings(schema):
        by_name.setdefault(key.rpartition(".")[2], key)
    near = closest(name, by_name)
    return None if near is None else by_name[near]


def resolve(node: Node, schema: Node) -> Node:
    """Return the definition that a node of the schema refers to, or the node itself."""
    if "$ref" not in node:
        return node
    definition: Node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return definition


def tables_by_kind(node: Node, schema: Node) -> dict[str, Node]:
    """Return the tables of a discriminated union by kind, in order; an empty dict for any other node."""
    mapping = node.get("discriminator", {}).get("mapping", {})
    by_path = {path: kind for kind, path in mapping.items()}  # pydantic sorts it by kind
    return {by_path[member["$ref"]]: resolve(member, schema) for member in node["oneOf"]} if by_path else {}

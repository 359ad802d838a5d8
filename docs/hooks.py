"""What MkDocs writes into pages while it builds: settings and flags from the code, and files of the repository.

`python docs/hooks.py` writes the settings and flags into `settings.md` itself, which is also read without MkDocs.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfpar import config, launch, report, train
from tfpar.commands import command_line

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "settings.md"
CALLABLE = [importlib.import_module(f"tfpar.{name}").COMMAND for name in ("plan", "doctor")]  # functions, too
COMMANDS = {one.name: one for one in (train.COMMAND, launch.COMMAND, report.COMMAND, *CALLABLE)}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments that name what belongs in their place."""
    markdown = with_tables(markdown)
    markdown = markdown.replace("<!-- every example -->", examples())
    return re.sub(r"<!-- file (\S+) -->", lambda found: file_of_repository(found[1]), markdown)


def with_tables(markdown: str) -> str:
    """Return a page with new tables of settings and flags, each between its comment and `<!-- end -->`."""

    def table_of(found: re.Match[str]) -> str:
        tables = settings(config.schema()) if found[1] == "every setting" else command_flags(found[1].split()[-1])
        return f"<!-- {found[1]} -->\n\n{tables}\n\n<!-- end -->"

    return re.sub(r"<!-- (every setting|flags of \S+) -->.*?<!-- end -->", table_of, markdown, flags=re.DOTALL)


def examples() -> str:
    """Return the scripts of the folder `examples`, each under its docstring."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        docstring, _, code = path.read_text().removeprefix('"""').partition('"""')
        parts += [f"## `{path.name}`", docstring.strip(), f"```python\n{code.strip()}\n```"]
    return "\n\n".join(parts)


def file_of_repository(name: str) -> str:
    """Return the text of a file in the repository's root, with its links as they are in `docs`."""
    text = (ROOT / name).read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\(([A-Z]+)\.md", lambda found: f"]({found[1].lower()}.md", text)


def command_flags(name: str) -> str:
    """Return a table of the flags of a command."""
    command = COMMANDS[name]
    rows = [f"| `{flag}` | {meaning} |" for flag, meaning in command_line.meanings(command)]
    return "\n".join(["| Flag | Meaning |", "|---|---|", *rows])


def settings(schema: dict[str, Any]) -> str:
    """Return a heading and a table for every section of a run.

    Args:
        schema: The JSON schema of a run.
    """
    loose = {name: field for name, field in schema["properties"].items() if not sections(field, schema)}
    parts = ["## Top level", table(loose, schema)]
    for name, field in schema["properties"].items():
        for kind, section in sections(field, schema).items():
            title = f'`[{name}]` with `kind = "{kind}"`' if kind else f"`[{name}]`"
            parts += [f"## {title}", section.get("description", "").split("\n\n")[0].split(" >>>")[0]]
            parts.append(table(section["properties"], schema))
            for key, inner in section["properties"].items():
                for item in nested(inner, schema):
                    parts += [f"### `[{name}.{key}.*]`", item["description"].split("\n\n")[0]]
                    parts.append(table(item["properties"], schema))
    return "\n\n".join(parts)


def sections(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects that a field may hold, by their kind; by an empty name if there is one only."""
    if "discriminator" in field:
        return {kind: resolved(path, schema) for kind, path in field["discriminator"]["mapping"].items()}
    return {"": resolved(field["$ref"], schema)} if "$ref" in field else {}


def nested(field: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the object that each value of a mapping is, if it is one."""
    values = field.get("additionalProperties")
    if isinstance(values, dict) and "$ref" in values:
        yield resolved(values["$ref"], schema)


def resolved(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the definition at a path such as `#/$defs/Strategy`."""
    definition: dict[str, Any] = schema["$defs"][path.rpartition("/")[2]]
    return definition


def table(fields: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a table of settings."""
    rows = ["| Setting | Values | Default | Meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        meaning = field.get("description", "").replace("|", "\\|")
        if field.get("changes_weights") is False:
            meaning += " *"
        default = f"`{toml(field['default'])}`" if "default" in field else "required"
        rows.append(f"| `{name}` | {values(field)} | {default} | {meaning} |")
    return "\n".join(rows)


def values(field: dict[str, Any]) -> str:
    """Return what a setting may hold, in words."""
    if "anyOf" in field:
        return ", or ".join(dict.fromkeys(values(one) for one in field["anyOf"]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{toml(one)}`" for one in field.get("enum", [field.get("const")]))
    kind = field.get("type")
    if kind == "array":
        return f"list of {values(field['items']).replace('number', 'numbers')}" if "items" in field else "list"
    if kind == "object" or "$ref" in field:
        return "table"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "null": '`"none"`',
    }
    bounds = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
    }
    limits = [words_of_bound.format(f"{field[bound]:,}") for bound, words_of_bound in bounds.items() if bound in field]
    example = [f"such as `{toml(field['examples'][0])}`"] if "examples" in field else []
    return ", ".join([words.get(str(kind), "any"), *limits, *example])


def toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    return '"none"' if value is None else json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))

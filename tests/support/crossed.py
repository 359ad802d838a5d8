"""What CI runs of tests with many rows: a few of a table, and combinations with each value of each parameter once.

mirrored-Adam    mirrored-SGD    mirrored-Lion          mirrored-Adam
pipeline-Adam    pipeline-SGD    pipeline-Lion    ──►                   pipeline-SGD
layers-Adam      layers-SGD      layers-Lion                                            layers-Lion
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `--whole-tables` adds: those marked extended, most rows of those marked crossed or few."""
    left = {item for item in items if item.get_closest_marker("extended")}
    for rows in _tables(items, "crossed"):
        left |= {*rows}.difference(sample(rows, [*map(_values, rows)]))
    for rows in _tables([item for item in items if item not in left], "few"):
        left |= {*rows}.difference(spread(rows, _number_of(rows[0]), rows[0].originalname))
    return left


def spread(rows: Sequence[Row], number: int, name: str) -> list[Row]:
    """Return some rows at equal distances: the first, the last, and others between them.

    A single row is not the same of each table, which would be one strategy alone.

    Args:
        rows: All rows.
        number: How many to return.
        name: The name of the table, which decides about a single row.
    """
    if number >= len(rows):
        return list(rows)
    if number == 1:
        return [rows[zlib.crc32(name.encode()) % len(rows)]]
    return [rows[round(place * (len(rows) - 1) / (number - 1))] for place in range(number)]


def _tables(items: Sequence[pytest.Item], marker: str) -> Iterable[list[pytest.Function]]:
    """Return the rows of each test function that has a marker."""
    functions: dict[object, list[pytest.Function]] = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(marker) and hasattr(item, "callspec"):
            functions[item.parent, item.originalname].append(item)
    return functions.values()


def _number_of(item: pytest.Function) -> int:
    marker = item.get_closest_marker("few")
    assert marker is not None
    return int(marker.args[0])


def sample(rows: Sequence[Row], values: Sequence[Mapping[str, Hashable]]) -> list[Row]:
    """Return few rows that have every value, in their order.

    Args:
        rows: All combinations.
        values: The value of each parameter of each row.
    """
    sets = [{*of_one.items()} for of_one in values]
    missing = {pair for pairs in sets for pair in pairs}
    counts: collections.Counter[tuple[str, Hashable]] = collections.Counter()
    taken: set[int] = set()
    while missing:
        # Of the rows with the most new values, one whose other values came least.
        news = [(len(pairs & missing), -sum(counts[pair] for pair in pairs)) for pairs in sets]
        best = news.index(max(news))
        taken.add(best)
        counts.update(sets[best])
        missing -= sets[best]
    return [row for number, row in enumerate(rows) if number in taken]


def _values(item: pytest.Function) -> dict[str, Hashable]:
    """Return the values of a test's parameters; those of one `parametrize` are one."""
    parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]  # pytest 9.2 does not declare it
    found: dict[str, Hashable] = {name: _key(value) for name, value in parameters.items()}
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found[" ".join(names)] = tuple(found.pop(name) for name in names)
    return found


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)

"""Traces of functions that return a record of the traced tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")


def trace_with_record(
    trace: Callable[..., Any], body: Callable[..., tuple[Any, Record]], *specs: Any
) -> tuple[Any, Record]:
    """Trace a function that returns tensors and a record of its tensors by role.

    A concrete function returns copies of its results, and only tensors. The record contains the tensors of the traced
    graph themselves, and values that are not tensors.

    Args:
        trace: Returns the concrete function of a Python function and the specs of its arguments.
        body: Returns the results of the function, a structure of tensors, and the record.
        *specs: The specs of the arguments.

    Returns:
        The concrete function and the record.
    """
    records: list[Record] = []

    def traced(*arguments: Any) -> Any:
        results, record = body(*arguments)
        records.append(record)
        return results

    function = trace(traced, *specs)
    return function, records[-1]  # TensorFlow traces again after a first trace that creates variables

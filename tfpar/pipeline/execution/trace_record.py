"""Trace a function and return what the trace found as one record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")


def trace_with_record(
    trace: Callable[..., Any], body: Callable[..., tuple[Any, Record]], *specs: Any
) -> tuple[Any, Record]:
    """Trace a function that returns tensors and a record of its tensors by role.

    A concrete function returns copies of its results, and only tensors. The record holds the tensors of the traced
    graph themselves, and what is not a tensor.

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

"""The code of a function and the numbers that it refers to, for a comparison between processes."""

from __future__ import annotations

import hashlib
import inspect
import types
from typing import Any

import numpy as np

_NUMBERS = (bool, int, float, np.generic, np.ndarray)


def facts_of(function: types.FunctionType) -> dict[str, Any]:
    """Return a digest of the code of a function, and the numbers of its defaults, closure and global values.

    The digest leaves out file names and lines, and the values leave out texts and containers, which may differ between
    hosts. Other functions that it calls are not read.

    Args:
        function: A function of Python.

    Returns:
        `code`, a digest, and `values`, which holds numbers and arrays.

    Example:
        >>> one, other = (facts_of(lambda x, scale=scale: scale * x) for scale in (1.0, 2.0))
        >>> one["code"] == other["code"], one["values"], other["values"]
        (True, {'scale': 1.0}, {'scale': 2.0})
    """
    found = inspect.getclosurevars(function)
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    values = {**found.globals, **found.nonlocals, **defaults}
    digest = hashlib.sha256(repr(_code(function.__code__)).encode()).hexdigest()[:12]
    numbers = {name: value for name, value in sorted(values.items()) if isinstance(value, _NUMBERS)}
    return {"code": digest, "values": numbers}


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(constants)

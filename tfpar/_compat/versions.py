"""Tested versions of Keras and TensorFlow, and checked access to their private attributes.

Any release may rename a private attribute. Python would not always raise an error: an assignment creates an unused
attribute, and `getattr` with a default returns the default. The functions below raise an error instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tfpar.messages import user_warnings

# From the first version, below the second; as in setup.cfg.
TESTED = {"keras": ((3, 15), (3, 17)), "tensorflow": ((2, 21), (2, 22))}


def warn_if_untested() -> None:
    """Warn if the installed Keras or TensorFlow is outside the tested range, without importing them."""
    untested = {name: version for name, version in _installed().items() if not _is_tested(name, version)}
    if untested:
        received = " and ".join(f"{name} {version}" for name, version in untested.items())
        ranges = [_range(name) for name in untested]
        requirements = " ".join(f'"{requirement}"' for requirement in ranges)
        user_warnings.warn(
            f"tfpar was tested with {' and '.join(ranges)}, received {received}: steps may fail, or differ from those "
            f"of one device. Install a tested version: pip install {requirements}."
        )


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of a Keras or TensorFlow object, class or module.

    Raises:
        RuntimeError: If it does not exist.
    """
    require(owner, name)
    return getattr(owner, name)


def replace(owner: Any, name: str, value: Any) -> None:
    """Assign an existing private attribute; raise RuntimeError if it does not exist."""
    require(owner, name)
    setattr(owner, name, value)


def require(owner: Any, *names: str) -> None:
    """Raise RuntimeError if a private attribute does not exist."""
    for name in names:
        if not hasattr(owner, name):
            raise _missing(f"{name!r} of {_described(owner)}")


def require_mentioned(function: Callable[..., Any], name: str) -> None:
    """Raise RuntimeError if a Keras or TensorFlow function no longer uses a name.

    Use it for attributes that are created late, or read with a default.

    Args:
        function: A Python function.
        name: The name of an attribute, or a constant in the function's code.
    """
    code = function.__code__
    if name not in (*code.co_names, *code.co_consts):
        raise _missing(f"{name!r} in {function.__module__}.{function.__qualname__}")


def closure_cell(function: Callable[..., Any], name: str) -> Any:
    """Return the cell of a variable in the closure of a Keras or TensorFlow function.

    Raises:
        RuntimeError: If the function has no such variable.
    """
    if name not in function.__code__.co_freevars or function.__closure__ is None:
        raise _missing(f"{name!r} in the closure of {function.__module__}.{function.__qualname__}")
    return function.__closure__[function.__code__.co_freevars.index(name)]


def _missing(what: str) -> RuntimeError:
    installed = ", ".join(f"{name} {version}" for name, version in _installed().items())
    return RuntimeError(
        f"tfpar replaces private parts of Keras and TensorFlow and misses {what} in {installed}: install "
        f"{' and '.join(map(_range, TESTED))}, which it was tested with."
    )


def _described(owner: Any) -> str:
    named = owner if hasattr(owner, "__name__") else type(owner)
    return ".".join(filter(None, (getattr(named, "__module__", None), named.__name__)))


def _installed() -> dict[str, str]:
    """Return the installed versions, without packages under another name, such as tensorflow-cpu."""
    installed = {}
    for name in TESTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def _is_tested(name: str, version: str) -> bool:
    least, below = TESTED[name]
    return least <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < below


def _range(name: str) -> str:
    least, below = (".".join(map(str, version)) for version in TESTED[name])
    return f"{name} >= {least}, < {below}"

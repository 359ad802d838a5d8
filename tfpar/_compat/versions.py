"""The versions of Keras and TensorFlow that tfpar was tested with, and names of theirs that must exist.

tfpar reads and replaces private parts of both, which any release may rename. Python raises no error for some of it: an
assignment creates an unused name, and `getattr` with a default returns the default. The functions below raise one
sentence instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tfpar.messages import user_warnings

# At least the first version, below the second; setup.cfg requires the same.
TESTED = {"keras": ((3, 15), (3, 17)), "tensorflow": ((2, 21), (2, 22))}


def warn_if_untested() -> None:
    """Warn once where the installed Keras or TensorFlow is outside of the tested range; imports neither."""
    untested = {name: found for name, found in _installed().items() if not _is_tested(name, found)}
    if untested:
        received = " and ".join(f"{name} {found}" for name, found in untested.items())
        ranges = [_range(name) for name in untested]
        requirements = " ".join(f'"{one}"' for one in ranges)
        user_warnings.warn(
            f"tfpar was tested with {' and '.join(ranges)}, received {received}: steps may fail, or differ from those "
            f"of one device. Install a tested version: pip install {requirements}."
        )


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of Keras or TensorFlow.

    Args:
        owner: An object, class or module of theirs.
        name: Of the attribute.

    Raises:
        RuntimeError: If there is none.
    """
    require(owner, name)
    return getattr(owner, name)


def replace(owner: Any, name: str, value: Any) -> None:
    """Assign a private attribute of Keras or TensorFlow that exists; raises as `private`."""
    require(owner, name)
    setattr(owner, name, value)


def require(owner: Any, *names: str) -> None:
    """Raise as `private` where a private attribute of Keras or TensorFlow does not exist."""
    for name in names:
        if not hasattr(owner, name):
            raise _missing(f"{name!r} of {_described(owner)}")


def require_mentioned(function: Callable[..., Any], name: str) -> None:
    """Raise as `private` where a function of Keras or TensorFlow no longer reads or sets a name.

    For an attribute that an object has after a while only, or that is read with a default.

    Args:
        function: A Python function of theirs.
        name: Of an attribute, or a constant in its code.
    """
    code = function.__code__
    if name not in (*code.co_names, *code.co_consts):
        raise _missing(f"{name!r} in {function.__module__}.{function.__qualname__}")


def _missing(what: str) -> RuntimeError:
    found = ", ".join(f"{name} {version}" for name, version in _installed().items())
    return RuntimeError(
        f"tfpar replaces private parts of Keras and TensorFlow and misses {what} in {found}: install "
        f"{' and '.join(map(_range, TESTED))}, which it was tested with."
    )


def _described(owner: Any) -> str:
    named = owner if hasattr(owner, "__name__") else type(owner)
    return ".".join(part for part in (getattr(named, "__module__", None), named.__name__) if part)


def _installed() -> dict[str, str]:
    """Return the versions of the installed packages; without one that has another name, such as tensorflow-cpu."""
    found = {}
    for name in TESTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _is_tested(name: str, version: str) -> bool:
    least, below = TESTED[name]
    return least <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < below


def _range(name: str) -> str:
    least, below = (".".join(map(str, one)) for one in TESTED[name])
    return f"{name} >= {least}, < {below}"

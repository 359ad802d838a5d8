"""Results that several test files need, computed once in a run of the tests."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
FOLDER: Path | None = None  # of this run; pytest's processes share it


def in_a_run(function: Function) -> Function:
    """Keep what a function returns in memory, and in a file for the other processes of pytest.

    Its arguments are strings, which name the result.
    """

    @functools.cache
    def kept(*arguments: str) -> Any:
        if FOLDER is None:  # not in a test
            return function(*arguments)
        words = "|".join((function.__module__, function.__qualname__, *arguments))
        path = FOLDER / hashlib.sha256(words.encode()).hexdigest()
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(function(*arguments)))
            unfinished.rename(path)
        return pickle.loads(path.read_bytes())

    return functools.wraps(function)(kept)  # type: ignore[return-value]

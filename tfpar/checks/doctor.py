"""The function `tfpar.doctor`, and the printed report of the command."""

from __future__ import annotations

import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tfpar.checks import examination, report
from tfpar.checks.check import Check, exit_code
from tfpar.checks.model_source import ModelSource, first_batch
from tfpar.config import bundled_configurations


def doctor(
    build_model: Callable[[], Any] | None = None,
    dataset: Any = None,
    *,
    config: str | None = None,
    overrides: Sequence[str] = (),
    num_logical_cpus: int = 2,
    num_workers: int = 1,
    verbose: int = 1,
) -> list[Check]:
    """Examine this machine, its devices and a model, as `python -m tfpar.doctor` does.

    Every device is examined in processes of its own, with time limits, so call it before TensorFlow takes the memory of
    the GPUs here: best at the beginning of a program.

    Args:
        build_model: A model function, defined in a file that can be imported again; None without a model.
        dataset: Its batches, `(inputs, targets)` or more each, of which the first is used; None to make one up.
        config: The name of a configuration, or a TOML file, in place of a model function.
        overrides: Settings `"section.key=value"` of the configuration. With a model function, those of `strategy`.
        num_logical_cpus: Without GPUs: the number of devices into which the CPU is split.
        num_workers: Number of workers to start on this machine, which examine the network between them.
        verbose: 1 prints each check as soon as it is known, 0 nothing.

    Returns:
        The results of all checks.

    Raises:
        ValueError: If the configuration is wrong, or the model function cannot be imported by another process.

    Example:
        >>> checks = tfpar.doctor(verbose=0)
        >>> [check.name for check in checks if check.status == "WRONG"]
        []
    """
    with tempfile.TemporaryDirectory(prefix="tfpar-doctor-") as folder:
        batch = ""
        if dataset is not None:
            batch = str(Path(folder) / "batch")
            Path(batch).write_bytes(pickle.dumps(first_batch(dataset)))
        source = None
        if build_model is not None:
            source = ModelSource(None, tuple(overrides), _name_of(build_model), batch=batch)
        elif config is not None:
            source = ModelSource(str(bundled_configurations.find(config)), tuple(overrides))
        if source is not None:
            source.run()  # raises if the configuration is wrong
        found = examination.examine(num_logical_cpus, source, num_workers)
        return reported(found, "text" if verbose else "nothing")


def _name_of(function: Callable[[], Any]) -> str:
    """Return the name by which another process imports a function."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if not name.isidentifier() or not hasattr(module, "__file__") or getattr(module, name, None) is not function:
        raise ValueError(
            f"tfpar.doctor runs the model function in other processes, which import it, and {function!r:.100} is not a "
            "function of a file. Move it to a file, as a function of its own."
        )
    return f"{inspect.getsourcefile(function)}:{name}"


def reported(found: Iterable[Check], output: str) -> list[Check]:
    """Return checks, and print each as soon as it is known.

    Args:
        found: The checks.
        output: "text"; "json" for all of them at the end; or "nothing".
    """
    checks = []
    for check in found:
        checks.append(check)
        if output == "text":
            print(report.lines(check), flush=True)
    if output == "json":
        print(report.to_json(checks))
    if output == "text":
        print(f"\n{report.summary(checks)}")
        if exit_code(checks):
            print(f"\nPaste this into an issue:\n\n{report.issue_block(checks)}")
    return checks

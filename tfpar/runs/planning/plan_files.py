"""The configuration file and the train command of a planned layout."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.cluster import tf_config
from tfpar.config import bundled_configurations
from tfpar.files import atomic_file
from tfpar.messages import received
from tfpar.messages.number_format import duration
from tfpar.planning.plan import Plan

HEADER = "# Written by python -m tfpar.plan: "


def with_strategy(run: config.Run, settings: Mapping[str, Any]) -> config.Run:
    """Return a run with another layout.

    Args:
        run: The run.
        settings: Settings of the strategy, including its kind. Other settings of the run's strategy are kept if they
            apply.

    Raises:
        ValueError: If the run and the layout do not fit together.

    Example:
        >>> with_strategy(config.Run(), {"kind": "mirrored", "num_logical_cpus": 2}).strategy.num_logical_cpus
        2
    """
    return config.Run.model_validate({**dict(run), "strategy": config.with_layout(run.strategy, settings)})


def check_writable(path: Path) -> None:
    """Check that `write` may write a file, before anything is measured.

    Args:
        path: The TOML file.

    Raises:
        ValueError: If its name does not end with .toml, its folder does not exist, or it is not an earlier plan.
    """
    shown = received.path(path)
    if path.suffix != ".toml":
        raise ValueError(f"--write must name a file that ends with .toml, received {shown!r}. Write --write plan.toml.")
    if not path.parent.is_dir():
        raise ValueError(f"--write must name a file in a folder that exists, received {shown!r}. Create the folder.")
    if path.exists() and not _is_plan(path):
        raise ValueError(
            f"--write overwrites plans of its own only, and {shown} holds something else: choose another name, or "
            "remove the file."
        )


def _is_plan(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEADER)) == HEADER.encode()


def write(run: config.Run, plan: Plan, path: Path) -> str:
    """Write the configuration of a run with the best layout of its plan.

    Args:
        run: The run.
        plan: A plan with a best layout.
        path: The TOML file, checked by `check_writable`.

    Returns:
        The command that trains the run.

    Raises:
        OSError: If the file cannot be written.
    """
    assert plan.best is not None, "the command writes no plan without a layout"
    command = f"{_program(plan)} --config {shlex.quote(str(path))}"
    header = f"{HEADER}{plan.best.layout}, {duration(plan.best.step_seconds)} a step.\n# Command: {command}\n\n"
    atomic_file.write(path, header + config.dump(with_strategy(run, plan.best.settings)))
    return command


def train_command(plan: Plan, name: str | None, overrides: Sequence[str]) -> str:
    """Return the command that trains a run with the best layout of its plan; empty without one.

    Args:
        plan: The plan.
        name: The name or file of the configuration; None for the default run.
        overrides: The overrides of the planned run.
    """
    if plan.best is None:
        return ""
    file = None if name is None else bundled_configurations.find(name)
    kept = [override for override in overrides if not override.partition("=")[0].strip().startswith("strategy")]
    settings = plan.best.settings
    planned = with_strategy(config.load(file, overrides), settings).strategy
    changes = [f"strategy.{key}={_value(value)}" for key, value in settings.items()]
    if _strategy(file, [*kept, *changes]) != planned:  # the file has more settings, or those of another kind
        section = planned.model_dump(exclude_defaults=True, exclude={"kind"})
        changes = [f"strategy={{kind={received.toml(planned.kind)}}}"]
        changes += [f"strategy.{key}={_value(value)}" for key, value in section.items()]
    flags = [word for override in (*kept, *changes) for word in ("--set", override)]
    words = [*(["--config", name] if name is not None else []), *flags]
    return " ".join([_program(plan), *map(shlex.quote, words)])


def _strategy(file: Path | None, overrides: Sequence[str]) -> config.Strategy | None:
    """Return the strategy of a configuration with overrides; None if it is invalid."""
    try:
        return config.load(file, overrides).strategy
    except ValueError:
        return None


def _program(plan: Plan) -> str:
    """Return the train program, run by the launcher if the layout has several workers."""
    if plan.best is None or plan.best.layout.num_workers == 1:
        return "python -m tfpar.train"
    job = tf_config.from_environment(os.environ)
    hosts = ""
    if job is not None and not job.is_on_loopback:
        names = dict.fromkeys(shlex.quote(tf_config.split_address(address)[0]) for address in job.addresses)
        hosts = f" --hosts {','.join(names)}"
    return f"python -m tfpar.launch --num_workers {plan.best.layout.num_workers}{hosts} -- -m tfpar.train"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else received.toml(value)

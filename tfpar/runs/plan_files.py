"""The configuration and the command of a planned layout; no TensorFlow."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.config import bundled_configurations
from tfpar.files import atomic_file
from tfpar.messages import received
from tfpar.planning.plan import Plan, Row
from tfpar.planning.quantities import duration, memory

HEADER = "# Written by python -m tfpar.plan: "


def with_strategy(run: config.Run, settings: Mapping[str, Any]) -> config.Run:
    """Return a run under another layout, checked like all configurations.

    Args:
        run: The run.
        settings: Of the section of the strategy, with its kind; its other settings are kept where they apply.

    Raises:
        ValueError: If run and layout do not fit together.

    Example:
        >>> with_strategy(config.Run(), {"kind": "mirrored", "num_logical_cpus": 2}).strategy.num_logical_cpus
        2
    """
    return config.Run.model_validate({**dict(run), "strategy": config.with_layout(run.strategy, settings)})


def check_writable(path: Path) -> None:
    """Refuse a file that `write` must not write, before anything is measured.

    Args:
        path: The TOML file.

    Raises:
        ValueError: If its name does not end with .toml, its folder does not exist, or it holds something else than an
            earlier plan.
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
    """Write the configuration of a run under the layout that its plan takes, loadable by the train command.

    Args:
        run: The run.
        plan: Its plan.
        path: The TOML file, for which `check_writable` was called.

    Returns:
        The command that trains it.

    Raises:
        ValueError: If the plan takes no layout.
        OSError: If the file cannot be written.
    """
    if plan.taken is None:
        raise ValueError(f"--write writes the layout of the first row, and no layout is taken: {path} is not written.")
    step, size = duration(plan.taken.step_seconds), memory(plan.taken.memory_bytes)
    measured = plan.taken.measured_seconds
    command = f"{_program(plan)} --config {shlex.quote(str(path))}"
    header = (
        f"{HEADER}{plan.taken.layout}, {step} a step and {size} on a device predicted"
        f"{'' if measured is None else f', {duration(measured)} measured'}.\n"
        f"# Command: {command}\n\n"
    )
    atomic_file.write(path, header + config.dump(with_strategy(run, _settings(plan.taken))))
    return command


def command_of(plan: Plan, name: str | None, overrides: Sequence[str]) -> str:
    """Return the command that trains a run under the layout that its plan takes; "" if it takes none.

    Args:
        plan: The plan.
        name: The name or file of the configuration; None for the default run.
        overrides: Settings that the plan was made with.
    """
    if plan.taken is None:
        return ""
    file = None if name is None else bundled_configurations.find(name)
    kept = [one for one in overrides if not one.partition("=")[0].strip().startswith("strategy")]
    settings = _settings(plan.taken)
    wanted = with_strategy(config.load(file, overrides), settings).strategy
    changes = [f"strategy.{key}={_value(value)}" for key, value in settings.items()]
    if _strategy(file, [*kept, *changes]) != wanted:  # the file has other settings, or those of another kind
        section = wanted.model_dump(exclude_defaults=True, exclude={"kind"})
        changes = [f"strategy={{kind={received.toml(wanted.kind)}}}"]
        changes += [f"strategy.{key}={_value(value)}" for key, value in section.items()]
    words = [*(["--config", name] if name is not None else []), *_flags([*kept, *changes])]
    return " ".join([_program(plan), *map(shlex.quote, words)])


def _settings(row: Row) -> dict[str, Any]:
    """Return the settings of a row for a process of its own, which makes the logical CPUs that they name."""
    names = [name.rpartition("CPU:")[2] for name in row.settings.get("devices", []) if "CPU:" in name]
    if "num_logical_cpus" in row.settings or not any(map(int, names)):
        return dict(row.settings)
    return {**row.settings, "num_logical_cpus": 1 + max(map(int, names))}


def _strategy(file: Path | None, overrides: Sequence[str]) -> config.Strategy | None:
    """Return the section of a configuration with overrides; None if it does not load."""
    try:
        return config.load(file, overrides).strategy
    except ValueError:
        return None


def _program(plan: Plan) -> str:
    hosts = plan.taken.layout.num_hosts if plan.taken is not None else 1
    if hosts == 1:
        return "python -m tfpar.train"
    names = ",".join(f"HOST{number}" for number in range(1, hosts + 1)) if hosts <= 4 else "HOST1,HOST2,..."
    return f"python -m tfpar.launch --num_workers {hosts} --hosts {names} -- -m tfpar.train"


def _flags(overrides: Sequence[str]) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else received.toml(value)

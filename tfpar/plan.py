"""`python -m tfpar.plan`: rank the layouts in which a configured model could train, and say how good the prediction is.

python -m tfpar.plan --config run.toml                     on the devices that are there
python -m tfpar.plan --config run.toml --devices 8 --hosts 2 --memory 24GiB          on others
python -m tfpar.plan --config run.toml --write plan.toml   and write the configuration of the first row
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from tfpar import cluster, config
from tfpar.cluster import tf_config
from tfpar.commands import callable_module, command_line, start_up
from tfpar.commands.number_flags import Integer, Number, check_within
from tfpar.commands.path_flags import FilePath
from tfpar.commands.quantity_flags import Bandwidth, Size
from tfpar.config import bundled_configurations
from tfpar.messages import received
from tfpar.messages.received import quoted
from tfpar.planning.stated import MOST_DEVICES, MOST_HOSTS, MOST_MEASURED, Stated, check_speed
from tfpar.runs import plan_files

if TYPE_CHECKING:
    from tfpar.planning.plan import Plan

_VALUES: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]  # other commands have flags of the same names
_CONFIG = flags.DEFINE(
    FilePath(),
    "config",
    None,
    "Name of a configuration, or a TOML file; by default the settings of digits.",
    flag_values=_VALUES,
)
_SET = flags.DEFINE_multi_string("set", [], "Change one setting; may be repeated.", flag_values=_VALUES)
_DEVICES = flags.DEFINE(
    Integer(), "devices", None, "Devices of each planned host; by default those of this machine.",
    flag_values=_VALUES,
)  # fmt: skip
_HOSTS = flags.DEFINE(
    Integer(), "hosts", 1, "Planned hosts, each with these devices; by default 1.", flag_values=_VALUES
)
_MEMORY = flags.DEFINE(
    Size(), "memory", None, "Memory of each planned device, such as 24GiB; by default that of this machine's.",
    flag_values=_VALUES,
)  # fmt: skip
_SPEED = flags.DEFINE(
    Number(), "device_speed", 1.0, "Speed of the planned devices, relative to this machine's; by default 1.",
    flag_values=_VALUES,
)  # fmt: skip
_BANDWIDTH = flags.DEFINE(
    Bandwidth(), "bandwidth", None, "Bandwidth of the planned links, such as 10GB/s or 25Gbit/s; by default measured.",
    flag_values=_VALUES,
)  # fmt: skip
_JSON = flags.DEFINE_bool("json", False, "Print the plan as JSON.", flag_values=_VALUES)
_WRITE = flags.DEFINE(
    FilePath(),
    "write",
    None,
    "Write the configuration with the layout of the first row to this TOML file.",
    flag_values=_VALUES,
)
_LOGICAL_CPUS = flags.DEFINE(
    Integer(), "logical_cpus", None, "Without GPUs: number of devices into which the CPU is split; by default, "
    "strategy.num_logical_cpus, or 2.",
    flag_values=_VALUES,
)  # fmt: skip
_MEASURED = flags.DEFINE(
    Integer(), "measured_layouts", None, "Layouts to train for a moment, where predictions are too close to choose "
    "from; 0 predicts alone; by default up to 3 in the first 45 seconds.",
    flag_values=_VALUES,
)  # fmt: skip
MOST_LOGICAL_CPUS, USUAL_LOGICAL_CPUS = 64, 2
NO_LAYOUT = 1
COMMAND = command_line.Command(
    name="tfpar.plan",
    usage=["[FLAG ...]"],
    flags={
        "config": "CONFIG",
        "set": "SECTION.SETTING=VALUE",
        "devices": "N",
        "hosts": "N",
        "memory": "SIZE",
        "device_speed": "TIMES",
        "bandwidth": "BANDWIDTH",
        "logical_cpus": "N",
        "measured_layouts": "N",
        "json": "",
        "write": "FILE",
    },
    examples=[
        "python -m tfpar.plan --config digits",
        "python -m tfpar.plan --config run.toml --devices 8 --memory 24GiB",
        "python -m tfpar.plan --config run.toml --write plan.toml",
    ],
    details=lambda: (
        "The model is measured on one device and on several at once, at the global batch\nof the configuration, in a "
        "process of its own. Layouts too close to choose from\nare trained for a moment. No model is kept.\n\n"
        "Exit code 0: a layout is taken; 1: none fits, or the measurement is too noisy to\nrank; 2: something is wrong."
    ),
    values=_VALUES,
    error_code=2,
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: The command line without the flags that absl has parsed.

    Returns:
        The exit code: 0 if the plan takes a layout, 1 if it takes none, 2 on an error, 130 when interrupted.
    """
    try:
        if len(argv) > 1:
            raise ValueError(f"Arguments must be flags, received {quoted(argv[1])}. See python -m tfpar.plan --help.")
        _check_flags()
        file = None if _CONFIG.value is None else bundled_configurations.find(_CONFIG.value)
        run = config.load(file, _SET.value)
        if _WRITE.value is not None:
            plan_files.check_writable(Path(_WRITE.value))
        stated = Stated(_DEVICES.value, _HOSTS.value, _MEMORY.value, _SPEED.value, _BANDWIDTH.value)
        found = _measured(run, stated)
        found = dataclasses.replace(found, command=plan_files.command_of(found, _CONFIG.value, _SET.value))
        print(found.to_json() if _JSON.value else f"{found}\n", end="")
        if _WRITE.value is not None:
            _write(run, found, _WRITE.value)
        return NO_LAYOUT if found.taken is None else 0
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print("\n".join(command_line.error_lines(str(error))), file=sys.stderr)
        return 2


def _write(run: config.Run, found: Plan, path: str) -> None:
    if found.taken is None:
        earlier = ", and holds an earlier plan" if Path(path).exists() else ""
        print(f"No layout is taken, so {received.path(path)} is not written{earlier}.", file=sys.stderr)
        return
    command = plan_files.write(run, found, Path(path))
    if not _JSON.value:
        from tfpar.planning.table import command_lines

        print(f"Written:   {received.path(path)}", *command_lines("", command), sep="\n")


def _check_flags() -> None:
    for name, value, least, most in (
        ("devices", _DEVICES.value, 1, MOST_DEVICES),
        ("hosts", _HOSTS.value, 1, MOST_HOSTS),
        ("logical_cpus", _LOGICAL_CPUS.value, 1, MOST_LOGICAL_CPUS),
        ("measured_layouts", _MEASURED.value, 0, MOST_MEASURED),
    ):
        if value is not None:
            check_within(name, value, least, most)
    check_speed("--device_speed", _SPEED.value)
    job = tf_config.from_environment(os.environ)
    if job is not None and job.num_workers > 1:
        raise ValueError(
            f"The environment describes a job of {job.num_workers} workers, and the planner measures one machine: "
            f"start it without TF_CONFIG, with --hosts {job.num_workers} for such a job."
        )


def _measured(run: config.Run, stated: Stated) -> Plan:
    number = _LOGICAL_CPUS.value or max(getattr(run.strategy, "num_logical_cpus", 1), USUAL_LOGICAL_CPUS)
    with cluster.native_messages_to(Path(os.devnull)):
        with start_up.importing():
            from tfpar.runs import plan_run

        return plan_run.plan_of(run, stated, number, _MEASURED.value)


def _function() -> Callable[..., Plan]:
    from tfpar.planning.planner import plan

    return plan


callable_module.make_callable(__name__, _function)


def run() -> None:
    """Entry point of the console script `tfpar-plan`."""
    command_line.run(main, functools.partial(command_line.parse, COMMAND), bug_code=2)


if __name__ == "__main__":
    run()

"""`python -m tfpar.plan`: train layouts of a configured model for some steps each, and rank them.

python -m tfpar.plan --config run.toml                                    on the devices that are there
python -m tfpar.plan --config run.toml --write plan.toml                  and write the configuration of the first row
python -m tfpar.launch --num_workers 2 -- -m tfpar.plan --config run.toml       on several workers
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
from tfpar.config import bundled_configurations
from tfpar.messages import received
from tfpar.messages.received import quoted
from tfpar.planning.search import USUAL_BUDGET_SECONDS, check_budget
from tfpar.runs.planning import plan_files

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
    Integer(), "devices", None, "Number of the devices to use; by default all. Without GPUs, of the devices into which "
    "the CPU is split; by default strategy.num_logical_cpus, or 2.",
    flag_values=_VALUES,
)  # fmt: skip
_BUDGET = flags.DEFINE(
    Number(), "budget", USUAL_BUDGET_SECONDS, f"Seconds to measure in; by default {USUAL_BUDGET_SECONDS:g}.",
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
MOST_DEVICES, USUAL_LOGICAL_CPUS = 64, 2
NO_LAYOUT = 1
COMMAND = command_line.Command(
    name="tfpar.plan",
    usage=["[FLAG ...]"],
    flags={
        "config": "CONFIG",
        "set": "SECTION.SETTING=VALUE",
        "devices": "N",
        "budget": "SECONDS",
        "json": "",
        "write": "FILE",
    },
    examples=[
        "python -m tfpar.plan --config digits",
        "python -m tfpar.plan --config run.toml --budget 120 --write plan.toml",
        "python -m tfpar.launch --num_workers 2 -- -m tfpar.plan --config run.toml",
    ],
    details=lambda: (
        "Layouts are trained for some steps at the global batch of the configuration, in\nprocesses of their own. No "
        "model is kept. Under tfpar.launch the workers\nmeasure layouts together.\n\n"
        "Exit code 0: a layout is first; 1: none could be measured; 2: something is\nwrong."
    ),
    values=_VALUES,
    error_code=2,
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: The command line without the flags that absl has parsed.

    Returns:
        The exit code: 0 if a layout is first, 1 if none could be measured, 2 on an error, 130 when interrupted.
    """
    try:
        if len(argv) > 1:
            raise ValueError(f"Arguments must be flags, received {quoted(argv[1])}. See python -m tfpar.plan --help.")
        if _DEVICES.value is not None:
            check_within("devices", _DEVICES.value, 1, MOST_DEVICES)
        check_budget("--budget", _BUDGET.value)
        file = None if _CONFIG.value is None else bundled_configurations.find(_CONFIG.value)
        run = config.load(file, _SET.value)
        if _WRITE.value is not None:
            plan_files.check_writable(Path(_WRITE.value))
        plan = _measured(run)
        return 0 if plan is None else _show(run, plan)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print("\n".join(command_line.error_lines(str(error))), file=sys.stderr)
        return 2


def _measured(run: config.Run) -> Plan | None:
    """Return the plan; None on workers other than the chief."""
    job = tf_config.from_environment(os.environ)
    usual_cpus = USUAL_LOGICAL_CPUS if job is None or job.num_workers == 1 else 1
    with cluster.native_messages_to(Path(os.devnull)):
        with start_up.importing():
            from tfpar.runs.planning import plan_devices, plan_run

            devices = plan_devices.planned_devices(run.strategy, _DEVICES.value, usual_cpus)
        return plan_run.make_plan(run, devices, _BUDGET.value)


def _show(run: config.Run, plan: Plan) -> int:
    plan = dataclasses.replace(plan, command=plan_files.train_command(plan, _CONFIG.value, _SET.value))
    print(plan.to_json() if _JSON.value else f"{plan}\n", end="")
    if _WRITE.value is not None:
        _write(run, plan, _WRITE.value)
    return NO_LAYOUT if plan.best is None else 0


def _write(run: config.Run, plan: Plan, path: str) -> None:
    if plan.best is None:
        earlier = ", and holds an earlier plan" if Path(path).exists() else ""
        print(f"No layout trained, so {received.path(path)} is not written{earlier}.", file=sys.stderr)
        return
    command = plan_files.write(run, plan, Path(path))
    if not _JSON.value:
        from tfpar.planning.plan_text import command_lines

        print(f"Written:   {received.path(path)}", *command_lines("", command), sep="\n")


def _function() -> Callable[..., Plan]:
    from tfpar.planning.planner import plan

    return plan


callable_module.make_callable(__name__, _function)


def run() -> None:
    """Entry point of the console script `tfpar-plan`."""
    command_line.run(main, functools.partial(command_line.parse, COMMAND), bug_code=2)


if __name__ == "__main__":
    run()

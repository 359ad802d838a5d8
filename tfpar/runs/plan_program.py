"""The program of a process that plans a run for `strategy.kind = "auto"`: the run that trains is not disturbed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfpar import cluster, config
from tfpar.commands import parent_process
from tfpar.planning.stated import Stated

FAILED = 2


def main(file: str, result: str, num_logical_cpus: str) -> int:
    """Plan a run, and write the plan as JSON.

    Args:
        file: The configuration of the run.
        result: The file to write.
        num_logical_cpus: Without GPUs: number of devices into which the CPU is split.

    Returns:
        The exit code: 0, or 2 after an error in configuration, model or data, with a sentence on standard error.
    """
    parent_process.end_with_parent()
    try:
        with cluster.native_messages_to(Path(os.devnull)):
            from tfpar.runs import plan_run

            plan = plan_run.plan_of(config.load(file), Stated(), int(num_logical_cpus))
        Path(result).write_text(plan.to_json())
        return 0
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

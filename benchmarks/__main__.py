"""The command: `python -m benchmarks` lists the experiments, `python -m benchmarks host_bound` runs one.

Several names run one after the other, `all` runs every one:

    python -m benchmarks host_bound cnn --rounds 5 --output results.json

The all-reduce by size and algorithm is a command of its own, `python -m benchmarks.all_reduce`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import app, flags

from benchmarks import parity_table, restart
from benchmarks.experiments import EXPERIMENTS
from benchmarks.harness import Experiment, run_rounds
from benchmarks.machine import describe_machine
from benchmarks.pipelines import harness as pipelines
from benchmarks.pipelines import worker as pipelines_worker
from benchmarks.pipelines.experiments import PIPELINE_EXPERIMENTS
from benchmarks.pipelines.report import report_of
from benchmarks.process import WorkerError
from benchmarks.report import machine_table, result_table, write_json
from benchmarks.worker import measure

ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each contender has its turn.", 1)
OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results; replaced if it exists.")

SPEED = {experiment.name: experiment for experiment in EXPERIMENTS}
PIPELINE = {experiment.name: experiment for experiment in PIPELINE_EXPERIMENTS}
SUMMARIES = {
    **{name: experiment.summary for name, experiment in (*SPEED.items(), *PIPELINE.items())},
    restart.NAME: restart.SUMMARY,
    parity_table.NAME: parity_table.SUMMARY,
}


def main(arguments: Sequence[str]) -> None:
    """List the experiments, or run those named."""
    # In a file or a log, rich would otherwise break lines and names at 80 columns.
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    names = list(SUMMARIES) if "all" in arguments[1:] else arguments[1:]
    unknown = [name for name in names if name not in SUMMARIES]
    if unknown:
        sys.exit(f"There is no experiment {unknown[0]!r}. There are: {', '.join(SUMMARIES)}, all.")
    if not names:
        for name, summary in SUMMARIES.items():
            console.print(f"{name:22}{summary}", soft_wrap=True)
        return
    try:
        _run(names, console)
    except OSError as error:
        sys.exit(f"The results cannot be written: {error}. Give --output a file in an existing folder.")
    except WorkerError as error:
        sys.exit(f"A measurement failed: {error}")


def _run(names: Sequence[str], console: rich.console.Console) -> None:
    machine = describe_machine()
    console.print(machine_table(machine))
    entries: list[dict[str, Any]] = []
    _write(machine, entries)
    for name in names:
        entries.append(_run_one(name, console))
        _write(machine, entries)


def _run_one(name: str, console: rich.console.Console) -> dict[str, Any]:
    if name in SPEED:
        return _run_speed(SPEED[name], console)
    if name in PIPELINE:
        return _run_pipeline(PIPELINE[name], console)
    return _run_restart(console) if name == restart.NAME else _run_parity_table(console)


def _run_restart(console: rich.console.Console) -> dict[str, Any]:
    result = restart.run_rounds(ROUNDS.value, console.print)
    console.print(restart.table_of(result))
    return result


def _run_speed(experiment: Experiment, console: rich.console.Console) -> dict[str, Any]:
    result = run_rounds(experiment, ROUNDS.value, measure, console.print)
    console.print(result_table(result))
    return result.as_json()


def _run_pipeline(experiment: pipelines.Experiment, console: rich.console.Console) -> dict[str, Any]:
    result = pipelines.run_rounds(experiment, ROUNDS.value, pipelines_worker.measure, console.print)
    console.print(report_of(result))
    return result.as_json()


def _run_parity_table(console: rich.console.Console) -> dict[str, Any]:
    table = parity_table.run_table(report=console.print)
    print(parity_table.as_markdown(table))  # not through rich, which would break the lines
    return parity_table.as_json(table)


def _write(machine: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    if OUTPUT.value is not None:
        write_json(Path(OUTPUT.value), machine, entries)


if __name__ == "__main__":
    app.run(main)

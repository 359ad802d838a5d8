"""The command: `python -m benchmarks` lists the experiments, `python -m benchmarks host_bound` runs one.

Several names run one after the other, and `all` runs every one on CPUs:

    python -m benchmarks host_bound cnn --rounds 5 --output results.json

The results are written after each round. The same command with `--resume` keeps the finished rounds of an interrupted
run and measures the others. `gpu` measures the GPUs of this machine, each setting once, until its budget ends:

    python -m benchmarks gpu --budget_seconds 540 --output gpu.json             # and gpu.md, the table so far
    python -m benchmarks gpu --budget_seconds 540 --output gpu.json --resume    # what is missing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags

from benchmarks import all_reduce, commits, step_times
from benchmarks.experiments import EXPERIMENTS
from benchmarks.gpus import budget, contenders, table
from benchmarks.harness import Experiment, run_rounds
from benchmarks.machine import describe_machine
from benchmarks.one_core import ONE_CORE, TWO_DEVICES
from benchmarks.parity_table import PARITY_TABLE
from benchmarks.pipelines.experiments import PIPELINE_EXPERIMENTS
from benchmarks.pipelines.sleeping import HYBRID_SLEEPING, WORKERS_SLEEPING
from benchmarks.process import WorkerError
from benchmarks.recomputation import RECOMPUTATION
from benchmarks.report import machine_table, print_result
from benchmarks.restart import RESTART
from benchmarks.results import ResultFile
from benchmarks.scaling import layouts, parts
from benchmarks.shards import SHARDS
from benchmarks.tensor_parallel import TENSOR_PARALLEL
from benchmarks.vocabulary_loss import VOCABULARY_LOSS
from tfpar.files import atomic_file

ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each setting has its turn.", 1)
OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results; replaced if it exists.")
AGAINST = flags.DEFINE_string("against", None, "A commit: train the settings of tfpar with tfpar of that commit too.")
RESUME = flags.DEFINE_bool("resume", False, "Keep the finished rounds that --output holds, and measure the others.")
BUDGET_SECONDS = flags.DEFINE_float("budget_seconds", 540.0, "gpu: the most that all its settings may take.", 0.0)
SIZES = flags.DEFINE_list("sizes", list(all_reduce.SIZES), "all_reduce: sizes in KB or MB.")
ALGORITHM = flags.DEFINE_multi_enum(
    "algorithm", list(all_reduce.ALGORITHMS), list(all_reduce.ALGORITHMS), "all_reduce: which; may be repeated."
)
PARTS = flags.DEFINE_string("parts", str(parts.FILE), "scaling: the JSON file that scaling_parts has written.")

ALL = {
    experiment.name: experiment
    for experiment in (
        *EXPERIMENTS,
        ONE_CORE,
        TWO_DEVICES,
        *PIPELINE_EXPERIMENTS,
        HYBRID_SLEEPING,
        WORKERS_SLEEPING,
        parts.SCALING_PARTS,
        layouts.SCALING,
        all_reduce.ALL_REDUCE,
        RESTART,
        SHARDS,
        RECOMPUTATION,
        TENSOR_PARALLEL,
        VOCABULARY_LOSS,
        PARITY_TABLE,
    )
}


def main(arguments: Sequence[str]) -> None:
    """List the experiments, or run those named."""
    # In a file or a log, rich would otherwise break lines and names at 80 columns.
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    names = list(ALL) if "all" in arguments[1:] else arguments[1:]
    unknown = [name for name in names if name not in (*ALL, contenders.NAME)]
    if unknown:
        sys.exit(f"There is no experiment {unknown[0]!r}. There are: {', '.join(ALL)}, {contenders.NAME}, all.")
    if not names:
        summaries = {name: experiment.summary for name, experiment in ALL.items()}
        for name, summary in (summaries | {contenders.NAME: contenders.SUMMARY}).items():
            console.print(f"{name:22}{summary}", soft_wrap=True)
        return
    try:
        _run([_experiment(name) for name in names if name != contenders.NAME], contenders.NAME in names, console)
    except OSError as error:
        sys.exit(f"The results cannot be written: {error}. Give --output a file in an existing folder.")
    except (ValueError, WorkerError) as error:
        sys.exit(f"A measurement failed: {error}" if isinstance(error, WorkerError) else str(error))


def _experiment(name: str) -> Experiment:
    if name == all_reduce.NAME:
        return all_reduce.experiment(ALGORITHM.value, [all_reduce.size_bytes(text) for text in SIZES.value])
    if name == layouts.NAME:
        return layouts.experiment(Path(PARTS.value))
    return ALL[name] if AGAINST.value is None else step_times.against(ALL[name], commits.resolved(AGAINST.value))


def _run(experiments: Sequence[Experiment], with_gpus: bool, console: rich.console.Console) -> None:
    if RESUME.value and OUTPUT.value is None:
        raise ValueError("--resume reads the file of --output, and there is none: add --output.")
    turns = contenders.turns(contenders.devices_here()) if with_gpus else []
    machine = describe_machine()
    results = ResultFile(Path(OUTPUT.value) if OUTPUT.value is not None else None, machine, RESUME.value)
    finished = [results.rounds_of(experiment) for experiment in experiments]
    console.print(machine_table(machine))
    for experiment, rounds in zip(experiments, finished, strict=True):
        result = run_rounds(experiment, ROUNDS.value, console.print, rounds, results.save)
        print_result(result, console)
    if turns:
        _run_gpus(turns, results, console)


def _run_gpus(turns: Sequence[contenders.Turn], results: ResultFile, console: rich.console.Console) -> None:
    def report(line: str, outputs: budget.Outputs) -> None:
        console.print(line, soft_wrap=True)
        if OUTPUT.value is not None:
            atomic_file.write(Path(OUTPUT.value).with_suffix(".md"), table.as_markdown(turns, outputs) + "\n")

    # Not through rich, which would break the lines.
    print(table.as_markdown(turns, budget.run(turns, BUDGET_SECONDS.value, results, report)))


if __name__ == "__main__":
    app.run(main)

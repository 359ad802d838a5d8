"""The experiment `all_reduce`: seconds and GB/s of an all-reduce, by size and algorithm.

    python -m benchmarks all_reduce --sizes 4KB,1MB,64MB --algorithm tfpar --algorithm gloo

Two workers of one core and one thread each sum float32 numbers. Next to each time is the rate of the model, in which a
worker sends 2(n-1)/n of the bytes, whatever n: equal rates mean that only the wire counts. With one core a worker most
of the time is the processor's own, see the column of processor time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import rich.table

from benchmarks import peers, process
from benchmarks.harness import Experiment, Finding, Output, Result

NAME = "all_reduce"
ALGORITHMS = {
    "tfpar": "what tfpar.MultiWorker does with a gradient of this size",
    "tfpar bfloat16": "the same with compression",
    "ring, one piece": "TensorFlow's ring as it is without settings",
    "ring, pieces of 1 MB": "cut and put together again",
    "ring, pieces of 4 MB": "the same",
    "gather": "every worker gets all tensors and adds them up",
    "gloo": "torch.distributed.all_reduce",
}
UNITS = {"KB": 1 << 10, "MB": 1 << 20}
NUM_WORKERS = 2

SIZES = ("4KB", "64KB", "1MB", "4MB", "16MB", "64MB")


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as `64KB`.

    Raises:
        ValueError: If it is no whole number of KB or MB.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(KB|MB)", text.strip())
    if found is None:
        raise ValueError(f"A size is a whole number of KB or MB, such as 64KB, received {text!r}.")
    return int(found[1]) * UNITS[found[2]]


def repetitions(size: int) -> int:
    """Return how often a size is reduced: about 128 MB in all, between 8 and 100 times."""
    return max(8, min(100, (128 << 20) // size))


def sent_bytes(size: int, num_workers: int) -> float:
    """Return what each worker sends in the model of the ring: 2(n-1)/n of the bytes."""
    return 2 * (num_workers - 1) / num_workers * size


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """What the two workers of one turn reduce.

    Args:
        algorithm: A name in `ALGORITHMS`.
        sizes: Bytes of the tensors, one after the other.
    """

    algorithm: str
    sizes: Sequence[int]


def measure(setting: AllReduce) -> Output:
    """Return for each size the median time of a reduction, in seconds, of the slowest worker, and what follows from it.

    Args:
        setting: What to reduce.

    Raises:
        WorkerError: If a process fails.
    """
    if setting.algorithm == "gloo":
        peers.install("torch")
    workers = process.ask_workers("benchmarks.all_reduce_worker", setting, NUM_WORKERS)
    output: dict[str, float] = {}
    for number, size in enumerate(setting.sizes):
        found = [worker["found"][number] for worker in workers]
        seconds = max(times["seconds"] for times in found)
        output[f"{_show(size)}_seconds"] = seconds
        output[f"{_show(size)}_processor_seconds"] = max(times["processor_seconds"] for times in found)
        output[f"{_show(size)}_gigabytes_per_second"] = sent_bytes(size, NUM_WORKERS) / seconds / 1e9
    return output


def experiment(algorithms: Sequence[str], sizes: Sequence[int]) -> Experiment:
    """Return the experiment of some algorithms and sizes.

    Args:
        algorithms: Names in `ALGORITHMS`.
        sizes: Bytes.
    """
    findings = [_ratio("gloo", "tfpar", size) for size in sizes] if {"gloo", "tfpar"} <= set(algorithms) else []
    return Experiment(
        name=NAME,
        summary=f"float32 numbers, {NUM_WORKERS} workers, one core each: seconds and GB/s by size and algorithm",
        figure=f"{_show(max(sizes))}_seconds",
        settings={algorithm: AllReduce(algorithm, tuple(sizes)) for algorithm in algorithms},
        measure=measure,
        findings=tuple(findings),
    )


def _ratio(theirs: str, ours: str, size: int) -> Finding:
    figure = f"{_show(size)}_seconds"
    return Finding(f"{_show(size)}: {theirs} / {ours}", lambda outputs: outputs[theirs][figure] / outputs[ours][figure])


def table_of(result: Result) -> rich.table.Table:
    """Return the medians as a table for `rich.print`, one row for each algorithm and size.

    Args:
        result: Of `experiment`.
    """
    table = rich.table.Table(title=f"{result.experiment.name}: {result.experiment.summary}")
    for column in ("algorithm", "size", "ms", "processor ms", "model's bytes sent", "GB/s"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for name, setting in result.experiment.settings.items():
        for size in setting.sizes:
            seconds, processor_seconds, rate = (
                result.median(name, f"{_show(size)}_{figure}")
                for figure in ("seconds", "processor_seconds", "gigabytes_per_second")
            )
            sent = _show(math.ceil(sent_bytes(size, NUM_WORKERS)))
            table.add_row(
                name, _show(size), f"{1e3 * seconds:.2f}", f"{1e3 * processor_seconds:.2f}", sent, f"{rate:.3f}"
            )
    return table


def _show(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


ALL_REDUCE = experiment(list(ALGORITHMS), [size_bytes(text) for text in SIZES])

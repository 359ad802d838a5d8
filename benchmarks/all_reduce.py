"""The command `python -m benchmarks.all_reduce`: seconds and GB/s of an all-reduce, by size and algorithm.

    python -m benchmarks.all_reduce --sizes 4KB,1MB,64MB --rounds 3 --output results.json

Two workers of one core and one thread each add up float32 numbers. Beside each time stands the rate of the model, in
which a worker sends 2(n-1)/n of the bytes, whatever n: equal rates mean that only the wire counts. With
one core a worker most of the time is the processor's own, see the column of processor time.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table
from absl import app, flags

from benchmarks import peers, process
from benchmarks.machine import describe_machine
from benchmarks.report import machine_table, write_json
from tfpar.launcher.worker_group import free_addresses

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

SIZES = flags.DEFINE_list("sizes", ["4KB", "64KB", "1MB", "4MB", "16MB", "64MB"], "Sizes in KB or MB.")
ALGORITHM = flags.DEFINE_multi_enum("algorithm", list(ALGORITHMS), list(ALGORITHMS), "Which; may be repeated.")


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


def run_rounds(algorithms: Sequence[str], sizes: Sequence[int], num_rounds: int, report: Any) -> list[dict[str, Any]]:
    """Measure every algorithm once a round, each in fresh processes, all sizes in turn.

    Args:
        algorithms: Names in `ALGORITHMS`.
        sizes: Bytes.
        num_rounds: Rounds.
        report: Is told of each algorithm that is done.

    Returns:
        For each algorithm and size medians over the rounds: the middle time of one reduction, in seconds, on the
        slowest worker, its processor time, and the model's bytes by seconds.
    """
    if "gloo" in algorithms:
        peers.install("torch")
    seconds: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(1, num_rounds + 1):
        for algorithm in algorithms:
            for size, found in zip(sizes, _measure(algorithm, sizes), strict=True):
                seconds.setdefault((algorithm, size), []).append(found)
            report(f"all_reduce, round {number} of {num_rounds}: {algorithm}")
    return [_row(algorithm, size, rounds) for (algorithm, size), rounds in seconds.items()]


def _row(algorithm: str, size: int, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    middle = statistics.median(found["seconds"] for found in rounds)
    return {
        "algorithm": algorithm,
        "size_bytes": size,
        "seconds": middle,
        "processor_seconds": statistics.median(found["processor_seconds"] for found in rounds),
        "sent_bytes_of_the_model": sent_bytes(size, NUM_WORKERS),
        "gigabytes_per_second": sent_bytes(size, NUM_WORKERS) / middle / 1e9,
        "rounds": [found["seconds"] for found in rounds],
    }


def _measure(algorithm: str, sizes: Sequence[int]) -> list[dict[str, float]]:
    addresses = free_addresses(NUM_WORKERS)
    requests = [
        {"algorithm": algorithm, "sizes": list(sizes), "rank": rank, "addresses": addresses}
        for rank in range(NUM_WORKERS)
    ]
    answers = process.ask_all("benchmarks.all_reduce_worker", requests)
    workers = zip(*(answer["found"] for answer in answers), strict=True)
    return [{name: max(worker[name] for worker in found) for name in found[0]} for found in workers]


def table_of(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """Return the rows as a table for `rich.print`."""
    table = rich.table.Table(title=f"all_reduce: float32 numbers, {NUM_WORKERS} workers, one core each")
    for column in ("algorithm", "size", "ms", "processor ms", "model's bytes sent", "GB/s"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in rows:
        table.add_row(
            row["algorithm"],
            _show(row["size_bytes"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * row['processor_seconds']:.2f}",
            _show(math.ceil(row["sent_bytes_of_the_model"])),
            f"{row['gigabytes_per_second']:.3f}",
        )
    return table


def _show(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def main(arguments: Sequence[str]) -> None:
    """Measure and print, and write if asked."""
    try:
        if arguments[1:]:
            raise ValueError(f"There is nothing to name here, received {arguments[1]!r}. Use --algorithm and --sizes.")
        sizes = [size_bytes(text) for text in SIZES.value]
        machine = describe_machine()
        console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 130)
        console.print(machine_table(machine))
        rows = run_rounds(ALGORITHM.value, sizes, flags.FLAGS.rounds, console.print)
        console.print(table_of(rows))
        if flags.FLAGS.output is not None:
            write_json(Path(flags.FLAGS.output), machine, [{"name": "all_reduce", "rows": rows}])
    except (ValueError, OSError, process.WorkerError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 3, "How often each algorithm has its turn.", 1)
    flags.DEFINE_string("output", None, "JSON file for the results; replaced if it exists.")
    app.run(main)

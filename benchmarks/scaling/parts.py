"""The experiment `scaling_parts`: a block of a transformer and two links, from which `scaling` computes its table.

    python -m benchmarks scaling_parts --output benchmarks/scaling/parts.json

The link between hosts is measured between network namespaces, which needs root.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks import process
from benchmarks.all_reduce import NUM_WORKERS, AllReduce
from benchmarks.harness import Experiment, Output
from benchmarks.pipelines import worker
from benchmarks.pipelines.examples import NUM_BLOCKS
from benchmarks.pipelines.setting import Setting
from tfpar.pipeline.schedule.links import Link, link_of_all_reduce

FILE = Path(__file__).parent / "parts.json"
BLOCK, INSIDE, BETWEEN = "a block", "inside a host", "between hosts"


@dataclasses.dataclass(frozen=True)
class MeasuredLink:
    """A link, fitted to the all-reduces of two workers.

    Args:
        sizes: Bytes of the tensors.
        rate: The rate of the network between the workers, such as "1gbit"; None for the loopback.
    """

    sizes: tuple[int, ...] = (16 << 10, 256 << 10, 4 << 20, 16 << 20)
    rate: str | None = None


def measure(setting: Setting | MeasuredLink) -> Output:
    """Return the seconds and bytes of a block, or latency and bandwidth of a link.

    Args:
        setting: What to measure.

    Raises:
        WorkerError: If a process fails.
        OSError: If this process may not make hosts.
    """
    if isinstance(setting, Setting):
        return worker.measure(setting)
    # The pieces in which tfpar sends gradients.
    asked = AllReduce("ring, pieces of 4 MB", setting.sizes)
    workers = process.ask_workers("benchmarks.all_reduce_worker", asked, NUM_WORKERS, setting.rate)
    slowest = [max(times["seconds"] for times in same) for same in zip(*(one["found"] for one in workers), strict=True)]
    return dataclasses.asdict(link_of_all_reduce(setting.sizes, slowest, NUM_WORKERS))


SCALING_PARTS = Experiment(
    name="scaling_parts",
    summary="A transformer block on one core, and the links between two workers: the parts of the table of `scaling`",
    figure="forward_seconds",
    settings={
        BLOCK: Setting(
            "transformer",
            "pipeline",
            num_microbatches=8,
            microbatch_size=4,
            schedule="interleaved",
            num_stages=NUM_BLOCKS,
            num_devices=1,
            quantity="parts",
        ),
        INSIDE: MeasuredLink(),
        BETWEEN: MeasuredLink(rate="1gbit"),
    },
    measure=measure,
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The measured parts of the table.

    Args:
        forward_seconds: Forward pass of a micro-batch of `microbatch_rows` through a block.
        backward_seconds: Its backward pass.
        update_seconds: The optimizer's update of a block.
        cut_bytes: Bytes of a micro-batch between two blocks.
        gradient_bytes: Bytes of the gradients of a block.
        num_blocks: Blocks of the model, which are equal.
        microbatch_rows: Examples of a micro-batch.
        inside: The link inside a host.
        between: The link between two hosts.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    cut_bytes: float
    gradient_bytes: float
    num_blocks: int
    microbatch_rows: int
    inside: Link
    between: Link


def read(path: Path = FILE) -> Parts:
    """Return the parts of a file of results.

    Args:
        path: What `--output` of `scaling_parts` wrote.

    Raises:
        ValueError: If the file has no such results.
    """
    try:
        entries = {entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["experiments"]}
        settings: dict[str, Any] = entries[SCALING_PARTS.name]["settings"]
        block, inside, between = (settings[name] for name in (BLOCK, INSIDE, BETWEEN))
        return Parts(
            **block["medians"],
            num_blocks=block["setting"]["num_stages"],
            microbatch_rows=block["setting"]["microbatch_size"],
            inside=Link(**inside["medians"]),
            between=Link(**between["medians"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold the results of scaling_parts: {error!r}. Write it with python -m benchmarks "
            f"scaling_parts --output {path}."
        ) from None

"""The experiment `scaling`: the step of grids of 8 to 1,024 devices, computed from measured parts. No TensorFlow here.

    python -m benchmarks scaling                                     # from the stored parts, those of docs/scaling.md
    python -m benchmarks scaling --parts parts.json                  # from your own

Weak scaling: every device brings as many examples. Strong scaling: the global batch stays the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import Experiment, Output, Result
from benchmarks.scaling import parts as measured_parts
from benchmarks.scaling.parts import Parts
from tfpar.pipeline import schedule
from tfpar.pipeline.schedule.layouts import LayoutStep, Network, simulate_layout
from tfpar.pipeline.schedule.links import Algorithm, Link
from tfpar.pipeline.schedule.simulator import Durations
from tfpar.pipeline.schedule.transfer_hiding import hide_transfers

NAME = "scaling"
NUMBERS_OF_DEVICES = (8, 64, 256, 1024)
NUMBERS_OF_STAGES = (1, 2, 4, 8)
DEVICES_PER_HOST = 4
MICROBATCHES_PER_DEVICE = 8  # weak scaling
MICROBATCHES_OF_ALL = 1024  # strong scaling


@dataclasses.dataclass(frozen=True)
class Layout:
    """A grid of replicas and stages, with a global batch.

    Args:
        num_devices: Number of devices.
        num_stages: Stages of each replica.
        is_weak: Whether the global batch grows with the number of devices.
        parts: The file of the measured parts.
    """

    num_devices: int
    num_stages: int
    is_weak: bool
    parts: str

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.num_devices // self.num_stages

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all replicas in a step."""
        return MICROBATCHES_PER_DEVICE * self.num_devices if self.is_weak else MICROBATCHES_OF_ALL


def measure(layout: Layout) -> Output:
    """Return the computed step of a layout, the parts of it that its devices wait, and its efficiency.

    The efficiency is the step of one device with the whole global batch, divided by the step and the number of
    devices; once with a ring over the hosts, once with a tree.

    Args:
        layout: The layout.

    Raises:
        ValueError: If the file of the parts holds none.
    """
    parts = measured_parts.read(Path(layout.parts))
    step, tree = _steps(layout, parts, ("ring", "tree"))
    ideal_seconds = one_device_seconds(layout.num_microbatches, parts) / layout.num_devices
    return {
        "step_seconds": step.step_seconds,
        "efficiency": ideal_seconds / step.step_seconds,
        "bubble_share": step.bubble_seconds / step.step_seconds,
        "transfer_share": step.transfer_seconds / step.step_seconds,
        "all_reduce_share": step.all_reduce_seconds / step.step_seconds,
        "efficiency_with_tree": ideal_seconds / tree.step_seconds,
    }


def one_device_seconds(num_microbatches: int, parts: Parts) -> float:
    """Return the step of one device on a global batch.

    Args:
        num_microbatches: Micro-batches of the batch.
        parts: The measured parts.
    """
    of_block = num_microbatches * (parts.forward_seconds + parts.backward_seconds) + parts.update_seconds
    return parts.num_blocks * of_block


def _steps(layout: Layout, parts: Parts, algorithms: Sequence[Algorithm]) -> list[LayoutStep]:
    """Return the step with each of some all-reduces."""
    stages, blocks = layout.num_stages, parts.num_blocks // layout.num_stages
    network = Network(DEVICES_PER_HOST, parts.inside, parts.between)
    cuts = [
        parts.inside if network.host_of(cut) == network.host_of(cut + 1) else parts.between for cut in range(stages - 1)
    ]
    durations = Durations(
        forward_seconds=(blocks * parts.forward_seconds,) * stages,
        backward_seconds=(blocks * parts.backward_seconds,) * stages,
        input_gradient_seconds=(),
        weight_gradient_seconds=(),
        transfer_seconds=tuple(link.seconds(parts.cut_bytes) for link in cuts),
        update_seconds=(blocks * parts.update_seconds,) * stages,
    )
    one = schedule.make("1f1b", stages, layout.num_microbatches // layout.num_replicas)
    order = hide_transfers(one, durations).replicated(layout.num_replicas)
    cut_bytes, gradient_bytes = [parts.cut_bytes] * (stages - 1), [blocks * parts.gradient_bytes] * stages
    networks = [dataclasses.replace(network, all_reduce=algorithm) for algorithm in algorithms]
    return [simulate_layout(order, durations, cut_bytes, gradient_bytes, network) for network in networks]


def experiment(parts: Path = measured_parts.FILE) -> Experiment:
    """Return the experiment for measured parts.

    Args:
        parts: Their file.
    """
    layouts = [
        Layout(devices, stages, is_weak, str(parts))
        for is_weak, devices, stages in itertools.product((True, False), NUMBERS_OF_DEVICES, NUMBERS_OF_STAGES)
    ]
    return Experiment(
        name=NAME,
        summary="Weak and strong scaling to 1,024 devices on paper, from the stored parts of scaling_parts",
        figure="step_seconds",
        settings={_name(layout): layout for layout in layouts},
        measure=measure,
        has_rounds=False,
    )


def _name(layout: Layout) -> str:
    kind = "weak" if layout.is_weak else "strong"
    return f"{kind}, {layout.num_devices:,} devices, {layout.num_replicas:,} x {layout.num_stages}"


def as_markdown(result: Result) -> list[str]:
    """Return three tables as Markdown: the parts, weak scaling, strong scaling.

    The best layout of each number of devices is bold.

    Args:
        result: Of `experiment`.
    """
    path = next(iter(result.experiment.settings.values())).parts
    return [_parts_table(measured_parts.read(Path(path))), *(_table(result, is_weak) for is_weak in (True, False))]


def _parts_table(parts: Parts) -> str:
    def link(one: Link) -> str:
        return f"{1e3 * one.latency_seconds:.2f} ms and {one.bytes_per_second / 1e6:,.0f} MB/s"

    rows = {
        f"Block, {parts.microbatch_rows} examples": f"forward {1e3 * parts.forward_seconds:.1f} ms, "
        f"backward {1e3 * parts.backward_seconds:.1f} ms, update {1e3 * parts.update_seconds:.1f} ms",
        "Between two blocks": f"{parts.cut_bytes / 1e6:.2f} MB for {parts.microbatch_rows} examples",
        "Gradients of a block": f"{parts.gradient_bytes / 1e6:.2f} MB",
        "Link inside a host": link(parts.inside),
        "Link between hosts": link(parts.between),
    }
    return "\n".join(["| Part | Measured |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])


def _table(result: Result, is_weak: bool) -> str:
    titles = ("Devices", "Replicas x stages", "Step", "Efficiency", "Bubble", "Transfers", "All-reduce", "With a tree")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *_rows(result, is_weak)])


def _rows(result: Result, is_weak: bool) -> Iterator[str]:
    (outputs,) = result.rounds
    layouts = {name: layout for name, layout in result.experiment.settings.items() if layout.is_weak == is_weak}
    for devices in NUMBERS_OF_DEVICES:
        group = {name: layout for name, layout in layouts.items() if layout.num_devices == devices}
        best = max(outputs[name]["efficiency"] for name in group)
        for name, layout in group.items():
            found = outputs[name]
            efficiency = f"{found['efficiency']:.2f}"
            cells = (
                f"{devices:,}",
                f"{layout.num_replicas:,} x {layout.num_stages}",
                f"{1e3 * found['step_seconds']:,.0f} ms",
                f"**{efficiency}**" if found["efficiency"] == best else efficiency,
                *(
                    f"{found[f'{share}_share']:.0%}".replace("%", " %")
                    for share in ("bubble", "transfer", "all_reduce")
                ),
                f"{found['efficiency_with_tree']:.2f}",
            )
            yield "| " + " | ".join(cells) + " |"


SCALING = experiment()

"""The division of this machine's GPUs among the workers."""

from __future__ import annotations

import dataclasses
import textwrap

from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpus import Gpu, VisibleGpus

_COLUMNS = 80 - len("[launch] ")
_LONGEST_NAME = 18
_FULL = 0.25  # warn if other processes use more than this fraction of the memory


@dataclasses.dataclass(frozen=True)
class GpuDivision:
    """The GPUs of each worker.

    Args:
        shares: The GPUs of each worker, by rank on this host.
        visible: All GPUs visible to the launcher.

    Example:
        >>> GpuDivision(((Gpu("0"),), (Gpu("1"),)), VisibleGpus((Gpu("0"), Gpu("1")))).variables(1)
        {'CUDA_VISIBLE_DEVICES': '1', 'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'}
    """

    shares: tuple[tuple[Gpu, ...], ...]
    visible: VisibleGpus

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that make only a worker's own GPUs visible to it."""
        # "-1" hides all GPUs, as "" does, but survives programs that drop empty variables.
        variables = {gpus.VARIABLE: ",".join(gpu.name for gpu in self.shares[rank]) or "-1"}
        # Numbers are those of nvidia-smi, unless the user wrote them.
        return variables if self.visible.is_users else {**variables, gpus.ORDER: gpus.BY_BUS}

    def lines(self, first_rank: int = 0) -> list[str]:
        """Return the assignment and warnings as lines that fit 80 columns with the launcher's prefix.

        Args:
            first_rank: The rank of this host's first worker.
        """
        num_assigned = sum(map(len, self.shares))
        rest = self.visible.gpus[num_assigned:]
        paragraphs = [f"worker {rank}: {_names(share)}" for rank, share in enumerate(self.shares, first_rank) if share]
        if num_assigned and rest:
            paragraphs.append(f"given to no worker: {_names(rest)}")
        if self.visible.problem and self.visible.gpus:
            paragraphs.append(f"warning: {self.visible.problem}, so the free memory of the GPUs is not known.")
        paragraphs += [_warning(gpu) for share in self.shares for gpu in share if _is_full(gpu)]
        return [line for text in paragraphs for line in textwrap.wrap(text, _COLUMNS, subsequent_indent="  ")]


def divide(visible: VisibleGpus, num_workers: int, gpus_per_worker: int | None) -> GpuDivision | None:
    """Divide the visible GPUs among the workers; return None if there are no GPUs.

    Args:
        visible: The GPUs visible to the launcher.
        num_workers: Number of workers on this host.
        gpus_per_worker: Number of GPUs per worker. Defaults to an equal share; remaining GPUs stay unused.

    Raises:
        ValueError: If there are fewer GPUs than `gpus_per_worker` needs, or without it fewer GPUs than workers.

    Example:
        >>> divide(VisibleGpus(tuple(map(Gpu, "01234"))), 2, None).lines()
        ['worker 0: GPUs 0, 1', 'worker 1: GPUs 2, 3', 'given to no worker: GPU 4']
    """
    num_gpus = len(visible.gpus)
    share = num_gpus // num_workers if gpus_per_worker is None else gpus_per_worker
    if share * num_workers > num_gpus:
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        way_out = "Leave it out for an equal share" + ", or start fewer workers" * (num_gpus > 0)
        raise ValueError(
            f"--gpus_per_worker must be at most {num_gpus // num_workers} for {workers}, as there {_counted(visible)}, "
            f"received {gpus_per_worker}. {way_out}."
        )
    if not num_gpus:
        return None
    if gpus_per_worker is None and not share:
        raise ValueError(
            f"Each worker needs a GPU of its own, received --num_workers {num_workers}, and there {_counted(visible)}. "
            f"Start at most {num_gpus}, or train on CPUs with --gpus_per_worker 0."
        )
    shares = tuple(visible.gpus[rank * share : (rank + 1) * share] for rank in range(num_workers))
    return GpuDivision(shares, visible)


def _counted(visible: VisibleGpus) -> str:
    number = len(visible.gpus)
    counted = "is 1 GPU" if number == 1 else f"are {number} GPUs"
    return f"{counted} in {gpus.VARIABLE}" if visible.is_users else counted


def _names(assigned: tuple[Gpu, ...]) -> str:
    if all(gpu.name.isdigit() for gpu in assigned):
        return f"GPU{'s' * (len(assigned) > 1)} {', '.join(gpu.name for gpu in assigned)}"
    return ", ".join(_short(gpu.name) for gpu in assigned)


def _short(name: str) -> str:
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:12]}..{name[-4:]}"
    return f"GPU {name}" if name.isdigit() else shown


def _is_full(gpu: Gpu) -> bool:
    return gpu.used_mib is not None and gpu.total_mib is not None and gpu.used_mib > _FULL * gpu.total_mib


def _warning(gpu: Gpu) -> str:
    assert gpu.used_mib is not None
    assert gpu.total_mib is not None
    free = max(0, gpu.total_mib - gpu.used_mib)
    return (
        f"warning: other processes use the memory of {_short(gpu.name)}, of which {free:,} of {gpu.total_mib:,} MiB "
        f"are free. End them, or leave it out with {gpus.VARIABLE}."
    )

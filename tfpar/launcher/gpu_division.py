"""The GPUs of this machine, divided over the workers of a job as its cores are."""

from __future__ import annotations

import dataclasses
import textwrap

from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpus import Found, Gpu

_COLUMNS = 80 - len("[launch] ")
_LONGEST_NAME = 18
_FULL = 0.25  # other processes use more than this share of the memory


@dataclasses.dataclass(frozen=True)
class GpuDivision:
    """The GPUs of each worker.

    Args:
        shares: The GPUs of each worker, by rank; all empty if there are too few.
        found: All GPUs that the launcher may use.

    Example:
        >>> GpuDivision(((Gpu("0"),), (Gpu("1"),)), Found((Gpu("0"), Gpu("1")))).variables(1)
        {'CUDA_VISIBLE_DEVICES': '1', 'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'}
    """

    shares: tuple[tuple[Gpu, ...], ...]
    found: Found

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that give a worker its GPUs, and no other."""
        # "-1" hides all GPUs, as "" does, but survives programs that drop empty variables.
        visible = {gpus.VARIABLE: ",".join(gpu.name for gpu in self.shares[rank]) or "-1"}
        # The numbers are those of nvidia-smi, unless the user wrote them.
        return visible if self.found.is_users else {**visible, gpus.ORDER: gpus.BY_BUS}

    def lines(self, first_rank: int = 0) -> list[str]:
        """Return the plan, and warnings, in lines of at most 71 characters: 80 with the launcher's prefix.

        Args:
            first_rank: The rank of the first worker of this host.
        """
        num_given, num_found = sum(map(len, self.shares)), len(self.found.gpus)
        rest = self.found.gpus[num_given:]
        paragraphs = [f"worker {rank}: {_names(share)}" for rank, share in enumerate(self.shares, first_rank) if share]
        if num_given and rest:
            paragraphs.append(f"given to no worker: {_names(rest)}")
        if self.found.problem and num_found:
            paragraphs.append(f"warning: {self.found.problem}, so the free memory of the GPUs is not known.")
        paragraphs += [_warning(gpu) for share in self.shares for gpu in share if _is_full(gpu)]
        return [line for text in paragraphs for line in textwrap.wrap(text, _COLUMNS, subsequent_indent="  ")]


def divide(found: Found, num_workers: int, gpus_per_worker: int | None) -> GpuDivision | None:
    """Return the GPUs of each worker; None without any GPU, so that the workers' environment stays as it is.

    Args:
        found: The GPUs that the launcher may use.
        num_workers: Number of workers.
        gpus_per_worker: GPUs of each worker; None for an equal share. The rest is given to no worker.

    Raises:
        ValueError: If there are too few GPUs: for `gpus_per_worker`, or for one GPU a worker without it.

    Example:
        >>> divide(Found(tuple(map(Gpu, "01234"))), 2, None).lines()
        ['worker 0: GPUs 0, 1', 'worker 1: GPUs 2, 3', 'given to no worker: GPU 4']
    """
    num_found = len(found.gpus)
    share = num_found // num_workers if gpus_per_worker is None else gpus_per_worker
    if share * num_workers > num_found:
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        way_out = "Leave it out for an equal share" + ", or start fewer workers" * (num_found > 0)
        raise ValueError(
            f"--gpus_per_worker must be at most {num_found // num_workers} for {workers}, as there {_counted(found)}, "
            f"received {gpus_per_worker}. {way_out}."
        )
    if not num_found:
        return None
    if gpus_per_worker is None and not share:
        raise ValueError(
            f"Each worker needs a GPU of its own, received --num_workers {num_workers}, and there {_counted(found)}. "
            f"Start at most {num_found}, or train on CPUs with --gpus_per_worker 0."
        )
    shares = tuple(found.gpus[rank * share : (rank + 1) * share] for rank in range(num_workers))
    return GpuDivision(shares, found)


def _counted(found: Found) -> str:
    number = len(found.gpus)
    counted = "is 1 GPU" if number == 1 else f"are {number} GPUs"
    return f"{counted} in {gpus.VARIABLE}" if found.is_users else counted


def _names(several: tuple[Gpu, ...]) -> str:
    """Return names for the plan: numbers after the word GPU, UUIDs shortened in the middle."""
    if all(gpu.name.isdigit() for gpu in several):
        return f"GPU{'s' * (len(several) > 1)} {', '.join(gpu.name for gpu in several)}"
    return ", ".join(_short(gpu.name) for gpu in several)


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

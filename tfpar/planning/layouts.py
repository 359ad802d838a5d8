"""The layouts of a run: which strategy, with which sizes, on how many devices. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

Shard = Literal["optimizer", "weights"] | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to divide the training of a model over devices.

    The batch is divided over `num_replicas`. Each replica is one device, a pipeline of `num_stages` devices, or
    `num_shards` devices that divide each layer.

    Args:
        num_replicas: Replicas of the model, on all hosts together.
        num_stages: Stages of a replica; 1 for no pipeline.
        num_microbatches: Micro-batches of the share of a replica.
        schedule: Order of the actions of a pipeline.
        recompute: Whether a pipeline recomputes activations in the backward pass.
        shard: What is divided over the replicas; None for nothing.
        num_shards: Devices that divide each layer of a replica; 1 for tensor parallelism of none.
        num_hosts: Hosts, each with the same number of devices.
        across_hosts: Whether the hosts have consecutive stages of one pipeline, and not replicas.

    Example:
        >>> str(Layout(num_replicas=2, num_stages=2, num_microbatches=8))
        'Hybrid(2 x Pipeline(2, 8))'
        >>> Layout(num_replicas=4, shard="optimizer").num_devices
        4
    """

    num_replicas: int = 1
    num_stages: int = 1
    num_microbatches: int = 1
    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = "1f1b"
    recompute: bool = False
    shard: Shard = None
    num_shards: int = 1
    num_hosts: int = 1
    across_hosts: bool = False

    @property
    def num_devices(self) -> int:
        """The devices of all hosts."""
        return self.num_replicas * self.num_stages * self.num_shards

    @property
    def kind(self) -> str:
        """The `strategy.kind` of the train command."""
        if self.num_stages > 1:
            return "hybrid" if self.num_replicas > 1 or self.num_parts > 1 else "pipeline"
        if self.num_shards > 1:
            return "tensor_parallel"
        if self.num_hosts > 1:
            return "multi_worker"
        return "mirrored" if self.num_replicas > 1 else "single_device"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of section `[strategy]`, with its kind, without devices.

        Example:
            >>> Layout(num_stages=2, num_microbatches=8).settings
            {'kind': 'pipeline', 'num_stages': 2, 'num_microbatches': 8}
        """
        found: dict[str, Any] = {"kind": self.kind}
        if self.num_stages > 1:
            found |= {"num_stages": self.num_stages, "num_microbatches": self.num_microbatches}
            found |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
            found |= {"recompute": True} if self.recompute else {}
            found |= {"across_workers": True} if self.across_hosts else {}
        if self.num_shards > 1:
            found |= {"num_shards": self.num_shards}
        if self.kind in ("hybrid", "tensor_parallel") and self.replicas_per_host > 1:
            found |= {"num_replicas": self.replicas_per_host}
        if self.shard is not None:
            found |= {"shard": self.shard}
        return found

    def settings_on(self, devices: Sequence[str]) -> dict[str, Any]:
        """Return the settings with the devices that the layout uses on a host.

        Args:
            devices: Names of the devices of a host.

        Example:
            >>> Layout().settings_on(["GPU:0", "GPU:1"])
            {'kind': 'single_device', 'device': 'GPU:0'}
        """
        if self.kind == "single_device":
            return {**self.settings, "device": devices[0]}
        used = list(devices[: self.devices_per_host])
        if self.across_hosts:
            used = [f"{host}/{name}" for host in range(self.num_hosts) for name in used]
        return {**self.settings, "devices": used}

    @property
    def devices_per_host(self) -> int:
        """The devices of one host."""
        return self.num_devices // self.num_hosts

    @property
    def num_parts(self) -> int:
        """The hosts, each with a part of the batch; 1 where one pipeline is on all of them."""
        return 1 if self.across_hosts else self.num_hosts

    @property
    def replicas_per_host(self) -> int:
        """The replicas of one host."""
        return self.num_replicas // self.num_parts

    @property
    def cuts_between_hosts(self) -> tuple[int, ...]:
        """The cuts between stages of different hosts; cut c follows stage c.

        Example:
            >>> Layout(1, 4, 8, num_hosts=2, across_hosts=True).cuts_between_hosts
            (1,)
        """
        last_cut = self.num_stages - 1
        return tuple(range(self.devices_per_host - 1, last_cut, self.devices_per_host)) if self.across_hosts else ()

    @property
    def num_owners(self) -> int:
        """The number of replicas over which the updates of weights, and the optimizer's state, are divided.

        Replicas of a pipeline in one process always divide them, and so do those of shards in a job of several hosts.

        Example:
            >>> Layout(2).num_owners, Layout(2, shard="optimizer").num_owners, Layout(2, 2, 4).num_owners
            (1, 2, 2)
            >>> Layout(4, 2, 4, num_hosts=2).num_owners, Layout(4, 2, 4, num_hosts=2, shard="optimizer").num_owners
            (2, 4)
        """
        if self.shard is not None:
            return self.num_replicas
        runs_stages = self.num_stages > 1 or (self.num_shards > 1 and self.num_hosts > 1)
        return self.replicas_per_host if runs_stages else 1

    @property
    def num_owners_of_whole_weights(self) -> int:
        """The same for the weights that shards do not divide; in one process, all of these are of the first replica.

        Example:
            >>> [Layout(2, num_shards=2, num_hosts=n, shard="optimizer").num_owners_of_whole_weights for n in (1, 2)]
            [1, 2]
        """
        return 1 if self.num_shards > 1 and self.num_hosts == 1 else self.num_owners

    def __str__(self) -> str:
        """Return the name of the layout in a table."""
        shard = [f'shard="{self.shard}"'] if self.shard else []
        hosts = [f"hosts={self.num_hosts}"] if self.num_hosts > 1 else []
        if self.num_stages > 1:
            options = [f'"{self.schedule}"'] if self.schedule != "1f1b" else []
            options += ["recompute"] if self.recompute else []
            options += ["across_workers", *hosts] if self.across_hosts else []
            one = f"Pipeline({', '.join([str(self.num_stages), str(self.num_microbatches), *options])})"
        elif self.num_shards > 1:
            one = f"TensorParallel({self.num_shards})"
        elif self.num_hosts > 1:
            return f"MultiWorker({', '.join([str(self.num_replicas), *shard, *hosts])})"
        elif self.num_replicas > 1:
            return f"Mirrored({', '.join([str(self.num_replicas), *shard])})"
        else:
            return "SingleDevice"
        if self.kind in ("pipeline", "tensor_parallel") and self.num_replicas == 1:
            return one
        return f"Hybrid({', '.join([f'{self.num_replicas} x {one}', *shard, *hosts])})"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A layout that is not considered, and why.

    Args:
        layout: The layout.
        reason: Why, in a few words: "5 blocks".
    """

    layout: Layout
    reason: str


_MICROBATCHES_PER_STAGE = (1, 2, 4, 8)
_MOST_NAMED = 4
_STATE_OF_REPLICAS: tuple[Shard, ...] = (None, "optimizer")
_SCHEDULES: tuple[Literal["1f1b", "zero_bubble"], ...] = ("1f1b", "zero_bubble")


def candidates(
    num_devices: int, num_hosts: int, batch: int, num_blocks: int, divides_layers: bool, mixing: Sequence[str] = ()
) -> Iterator[Layout | Refusal]:
    """Yield the layouts that give one device's result on some devices, and those refused.

    Fewer devices than there are count too: one device may be faster than two. Of pipelines there are several numbers
    of micro-batches, two schedules, and recomputation.

    Args:
        num_devices: Devices of each host.
        num_hosts: Number of hosts.
        batch: Examples of the global batch.
        num_blocks: Layer calls between which the model can be cut; 0 if it cannot be cut.
        divides_layers: Whether the model has layers that tensor parallelism divides.
        mixing: Layers that mix the examples of a batch, which replicas refuse.

    Example:
        >>> [str(one) for one in candidates(2, 1, batch=4, num_blocks=0, divides_layers=False)]
        ['SingleDevice', 'Mirrored(2)', 'Mirrored(2, shard="optimizer")']
    """
    if num_hosts == 1:
        yield Layout()
    for used in numbers_tried(num_devices):
        total = used * num_hosts
        if total == 1:
            continue
        yield from _replicas(total, num_hosts, batch, num_blocks, mixing)
        for size in (size for size in range(2, used + 1) if used % size == 0):
            replicas = total // size
            yield from _pipelines(size, replicas, num_hosts, batch, num_blocks)
            if divides_layers:
                yield from _shards(size, replicas, num_hosts, batch)
        if num_hosts > 1:
            yield from _pipelines(total, 1, num_hosts, batch, num_blocks, across_hosts=True)


def smallest_microbatch(batch: int, num_devices: int) -> int:
    """Return the fewest examples of a micro-batch of any candidate on one host.

    Args:
        batch: Examples of the global batch.
        num_devices: Devices of the host.

    Example:
        >>> smallest_microbatch(64, num_devices=2)
        4
    """
    return max(1, batch // (num_devices * max(_MICROBATCHES_PER_STAGE)))


def numbers_tried(number: int) -> list[int]:
    """Return the numbers of devices, or of hosts, to consider: all, half of them, and the powers of two below.

    Args:
        number: Those that there are.

    Example:
        >>> numbers_tried(8), numbers_tried(12)
        ([1, 2, 4, 8], [1, 2, 4, 6, 8, 12])
    """
    powers = {1 << power for power in range(number.bit_length()) if 1 << power < number}
    return sorted(powers | {number} | ({number // 2} if number % 2 == 0 else set()))


def never_tried(num_devices: int, num_hosts: int, num_blocks: int, divides_layers: bool) -> Iterator[str]:
    """Yield in words the layouts of one device's result that are no candidates, each with the reason.

    Args:
        num_devices: Devices of each host.
        num_hosts: Number of hosts.
        num_blocks: As for `candidates`.
        divides_layers: As for `candidates`.

    Example:
        >>> list(never_tried(2, 1, num_blocks=2, divides_layers=True))
        ['gpipe (1f1b is as fast, with less memory)', 'micro-batches but 1, 2, 4, 8 a stage (too many to compare)']
        >>> list(never_tried(6, 1, num_blocks=0, divides_layers=False))
        ['5 of 6 devices (too many to compare)']
    """
    most_devices = num_devices * num_hosts
    others, numbers = list[str](), list[str]()
    if min(most_devices, num_blocks) > 1:
        yield "gpipe (1f1b is as fast, with less memory)"
        others += ["interleaved"] if num_blocks >= 4 else []  # two stages on each of two devices
        others += ["Pipeline(num_shards=n)"] if divides_layers and num_devices >= 4 else []
        others += ["Hybrid(across_workers)"] if num_hosts > 1 and most_devices >= 4 else []
        numbers.append(f"micro-batches but {', '.join(map(str, _MICROBATCHES_PER_STAGE))} a stage")
    if others:
        yield f"{', '.join(others)} (not predicted)"
    numbers += [*_untried(num_devices, "devices"), *_untried(num_hosts, "hosts")]
    if numbers:
        yield f"{', '.join(numbers)} (too many to compare)"


def _untried(number: int, name: str) -> list[str]:
    tried = numbers_tried(number)
    others = sorted({*range(1, number + 1)} - {*tried})
    if len(others) > _MOST_NAMED:
        return [f"{name} but {', '.join(map(str, tried))}"]
    return [f"{', '.join(map(str, others))} of {number} {name}"] if others else []


def _too_small(layout: Layout, batch: int) -> Refusal:
    return Refusal(layout, f"the batch has {batch} example{'s' * (batch != 1)}")


def _replicas(
    total: int, num_hosts: int, batch: int, num_blocks: int, mixing: Sequence[str]
) -> Iterator[Layout | Refusal]:
    shards: tuple[Shard, ...] = (None, "optimizer", "weights") if num_blocks > 1 else (None, "optimizer")
    for shard in shards:
        layout = Layout(num_replicas=total, shard=shard, num_hosts=num_hosts)
        if mixing:
            yield Refusal(layout, f"{' and '.join(mixing)} mix{'es' * (len(mixing) == 1)} examples")
        else:
            yield layout if batch >= total else _too_small(layout, batch)


def _shards(num_shards: int, replicas: int, num_hosts: int, batch: int) -> Iterator[Layout | Refusal]:
    for shard in _STATE_OF_REPLICAS if replicas > 1 else (None,):
        layout = Layout(replicas, num_shards=num_shards, num_hosts=num_hosts, shard=shard)
        yield layout if batch >= replicas else _too_small(layout, batch)


def _pipelines(
    num_stages: int, replicas: int, num_hosts: int, batch: int, num_blocks: int, *, across_hosts: bool = False
) -> Iterator[Layout | Refusal]:
    if num_blocks == 0:
        return
    counts = [per_stage * num_stages for per_stage in _MICROBATCHES_PER_STAGE]
    least = Layout(replicas, num_stages, counts[0], num_hosts=num_hosts, across_hosts=across_hosts)
    if num_stages > num_blocks:
        yield Refusal(least, f"{num_blocks} block{'s' * (num_blocks != 1)}")
        return
    possible = [count for count in counts if count * replicas <= batch]
    if not possible:
        yield _too_small(least, batch)
    # In one process the state of a pipeline is divided over its replicas anyway.
    shards = _STATE_OF_REPLICAS if least.num_parts > 1 else (None,)
    for count, schedule, shard in itertools.product(possible, _SCHEDULES, shards):
        layout = dataclasses.replace(least, num_microbatches=count, schedule=schedule, shard=shard)
        yield layout
        if schedule == "1f1b":
            yield dataclasses.replace(layout, recompute=True)

"""The devices that a run is planned for, and the settings that name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar import cluster, config
from tfpar.layout import Layout


class PlanDevices(NamedTuple):
    """The devices of a worker that a plan may use.

    Args:
        names: Their names.
        are_named: Whether settings must name them, as there are others, or the user has chosen them.
    """

    names: tuple[str, ...]
    are_named: bool = False

    @property
    def kind(self) -> str:
        """Their kind, "GPU" or "CPU"."""
        return self.names[0].partition(":")[0]

    def settings_of(self, layout: Layout) -> dict[str, Any]:
        """Return section `[strategy]` of the train command for a layout on these devices.

        Args:
            layout: The layout.

        Example:
            >>> PlanDevices(("CPU:0", "CPU:1")).settings_of(Layout(num_replicas=2))
            {'kind': 'mirrored', 'num_logical_cpus': 2}
            >>> PlanDevices(("GPU:0", "GPU:1")).settings_of(Layout())
            {'kind': 'single_device'}
        """
        settings, used = layout.settings, layout.devices_per_worker
        if self.kind == "CPU" and layout.kind == "single_device":
            return settings  # of all cores, as without logical CPUs
        if self.are_named:
            settings = layout.settings_on(self.names)
        if self.kind == "CPU":
            number = 1 + max(int(name.partition(":")[2]) for name in self.names[:used]) if self.are_named else used
            return settings | ({"num_logical_cpus": number} if number > 1 else {})
        if settings["kind"] in ("mirrored", "multi_worker") and used < len(self.names):  # it takes all that it can see
            return layout.settings_on(self.names)
        return settings


def planned_devices(strategy: config.Strategy, number: int | None = None, usual_cpus: int = 1) -> PlanDevices:
    """Return the devices to plan a run for, without starting TensorFlow.

    Args:
        strategy: The section of the run, which may name devices or a number of logical CPUs.
        number: How many of them to use; None for all.
        usual_cpus: Without GPUs, the least number of logical CPUs where neither is said.

    Raises:
        ValueError: If there are fewer devices, or one that is named does not exist.
    """
    chosen = _chosen(strategy)
    if chosen is None or chosen[0].startswith("GPU"):
        there = cluster.configured_devices(chosen)
    else:
        there = list(chosen)  # the CPU is not split yet
    if chosen is None and there[0].startswith("CPU"):
        count = number or max(getattr(strategy, "num_logical_cpus", 1), usual_cpus)
        return PlanDevices(tuple(f"CPU:{index}" for index in range(count)))
    if number is not None and number > len(there):
        raise ValueError(
            f"--devices must be at most {len(there)}, the devices that are there ({', '.join(there)}), received "
            f"{number}. A plan measures its layouts: run it on the machine that has the devices."
        )
    names = tuple(there[:number])
    return PlanDevices(names, chosen is not None or len(names) < len(there))


def _chosen(strategy: config.Strategy) -> Sequence[str] | None:
    """Return the devices that a run names; None for all, as where it names those of each worker."""
    device = getattr(strategy, "device", None)
    names = (device,) if device is not None else getattr(strategy, "devices", None)
    return None if names is None or any("/" in name for name in names) else names

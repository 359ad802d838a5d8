"""The devices that a run is planned for, and the settings that select them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar import cluster, config
from tfpar.layout import Layout


class PlanDevices(NamedTuple):
    """The devices of a worker that a plan may use.

    Args:
        names: The device names.
        are_named: Whether settings must list them: the user chose them, or there are others.
    """

    names: tuple[str, ...]
    are_named: bool = False

    @property
    def kind(self) -> str:
        """Their kind, "GPU" or "CPU"."""
        return self.names[0].partition(":")[0]

    def settings_of(self, layout: Layout) -> dict[str, Any]:
        """Return the section `[strategy]` for a layout on these devices.

        Example:
            >>> PlanDevices(("CPU:0", "CPU:1")).settings_of(Layout(num_replicas=2))
            {'kind': 'mirrored', 'num_logical_cpus': 2}
            >>> PlanDevices(("GPU:0", "GPU:1")).settings_of(Layout())
            {'kind': 'single_device'}
        """
        settings, used = layout.settings, layout.devices_per_worker
        if self.kind == "CPU" and layout.kind == "single_device":
            return settings  # use all cores, without logical CPUs
        if self.are_named:
            settings = layout.settings_on(self.names)
        if self.kind == "CPU":
            number = 1 + max(int(name.partition(":")[2]) for name in self.names[:used]) if self.are_named else used
            return settings | ({"num_logical_cpus": number} if number > 1 else {})
        if settings["kind"] in ("mirrored", "multi_worker") and used < len(self.names):  # it uses all visible GPUs
            return layout.settings_on(self.names)
        return settings


def planned_devices(strategy: config.Strategy, number: int | None = None, usual_cpus: int = 1) -> PlanDevices:
    """Return the devices to plan a run for, without starting TensorFlow.

    Args:
        strategy: The section of the run, which may set devices or a number of logical CPUs.
        number: Number of devices to use. Defaults to all.
        usual_cpus: Minimum number of logical CPUs on a machine without GPUs, unless `number` is set.

    Raises:
        ValueError: If there are fewer devices, or a listed one does not exist.
    """
    chosen = _chosen(strategy)
    if chosen is None or chosen[0].startswith("GPU"):
        available = cluster.configured_devices(chosen)
    else:
        available = list(chosen)  # the CPU is not split yet
    if chosen is None and available[0].startswith("CPU"):
        count = number or max(getattr(strategy, "num_logical_cpus", 1), usual_cpus)
        return PlanDevices(tuple(f"CPU:{index}" for index in range(count)))
    if number is not None and number > len(available):
        raise ValueError(
            f"--devices must be at most {len(available)}, the number of devices here ({', '.join(available)}), "
            f"received {number}. A plan measures its layouts: run it on the machine that has the devices."
        )
    names = tuple(available[:number])
    return PlanDevices(names, chosen is not None or len(names) < len(available))


def _chosen(strategy: config.Strategy) -> Sequence[str] | None:
    """Return the local devices that a run lists; None for all, also if it lists those of each worker."""
    device = getattr(strategy, "device", None)
    names = (device,) if device is not None else getattr(strategy, "devices", None)
    return None if names is None or any("/" in name for name in names) else names

"""What a user states of devices and links that are not there: applied to measured costs, and marked. Pure Python."""

from __future__ import annotations

import dataclasses
import math
import numbers

from tfpar.messages.received import quoted
from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import MachineCosts
from tfpar.planning.quantities import memory

MOST_DEVICES, MOST_HOSTS, MOST_MEASURED = 512, 512, 100
# Beyond these a step would be no time that a training has, or one that no number holds.
LEAST_SPEED, MOST_SPEED = 0.001, 1000.0
# Of 10 Gbit/s, which most machines have.
NETWORK_LATENCY_SECONDS, NETWORK_BYTES_PER_SECOND = 50e-6, 1.25e9
_SPEED_MEANING = "1.5 is a device that is 1.5 times as fast"
_MEMORY_MEANING, _BANDWIDTH_MEANING = "24 GiB is 24 * 2**30", "1 GB/s is 1e9"


@dataclasses.dataclass(frozen=True)
class Stated:
    """The devices and links to plan for, where they are not those of this machine.

    Args:
        num_devices: Devices of each host; None for those that are there.
        num_hosts: Number of hosts.
        memory_bytes: Memory of a device; None for that of the devices that are there.
        device_speed: Speed of a planned device, relative to those that are there.
        bandwidth: Bytes per second between devices, and between hosts; None for that measured.

    Raises:
        TypeError: If a number is none, such as the text "24GiB".
        ValueError: If a number is out of range.

    Example:
        >>> Stated(num_devices=8, device_speed=1.5).applied(MachineCosts("GPU", 2, 2)).assumed
        ('device speed 1.5',)
    """

    num_devices: int | None = None
    num_hosts: int = 1
    memory_bytes: int | None = None
    device_speed: float = 1.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has."""
        check_count("num_devices", 1 if self.num_devices is None else self.num_devices, 1, MOST_DEVICES)
        check_count("num_hosts", self.num_hosts, 1, MOST_HOSTS)
        _check_number("device_speed", self.device_speed, "a number", _SPEED_MEANING)
        check_speed("device_speed", self.device_speed)
        if self.memory_bytes is not None:
            _check_number("memory_bytes", self.memory_bytes, "a number of bytes", _MEMORY_MEANING)
            if not 1 <= self.memory_bytes < math.inf:
                raise ValueError(
                    f"memory_bytes must be finite and at least 1, received {self.memory_bytes}: {_MEMORY_MEANING}."
                )
        if self.bandwidth is not None:
            _check_number("bandwidth", self.bandwidth, "a number of bytes per second", _BANDWIDTH_MEANING)
            if not 1 <= self.bandwidth < math.inf:
                raise ValueError(
                    f"bandwidth must be finite and at least 1 byte per second, received {self.bandwidth}: "
                    f"{_BANDWIDTH_MEANING}."
                )

    @property
    def keeps_speed(self) -> bool:
        """Whether the devices and links are as fast as those that are there."""
        return self.device_speed == 1 and self.bandwidth is None

    def applied(self, machine: MachineCosts) -> MachineCosts:
        """Return the costs of a machine with what is stated in place of what was measured, and its names.

        Args:
            machine: The measured costs.
        """
        changes: dict[str, object] = {"num_hosts": self.num_hosts}
        assumed = list(machine.assumed)
        if self.num_devices is not None:
            changes["num_devices"] = self.num_devices
            if machine.num_cores:  # devices that are not there bring cores of their own
                changes["num_cores"] = max(machine.num_cores, self.num_devices * machine.cores_of_device)
        if self.memory_bytes is not None:
            changes["memory_bytes"] = self.memory_bytes
            assumed.append(f"memory {memory(self.memory_bytes)}")
        if self.device_speed != 1:
            changes["speed"] = self.device_speed
            assumed.append(f"device speed {self.device_speed:g}")
        if self.bandwidth is not None:
            changes["copy"] = _with_bandwidth(machine.copy, self.bandwidth)
            for name in ("reduce", "exchange"):
                links = getattr(machine, name).items()
                changes[name] = {number: _with_bandwidth(one, self.bandwidth) for number, one in links}
            assumed.append(f"bandwidth {memory(self.bandwidth)}/s")
        elif machine.num_measured == 1 and (self.num_devices or 1) > 1:
            assumed.append(f"{memory(machine.copy.bytes_per_second)}/s between devices")
        if self.num_hosts > 1:
            # Between hosts nothing is measured here: the bandwidth is stated or assumed.
            changes["network"] = Link(NETWORK_LATENCY_SECONDS, self.bandwidth or NETWORK_BYTES_PER_SECOND)
            if self.bandwidth is None:
                assumed.append(f"{memory(NETWORK_BYTES_PER_SECOND)}/s between hosts")
        return dataclasses.replace(machine, **changes, assumed=tuple(assumed))  # type: ignore[arg-type]


def _with_bandwidth(link: Link, bytes_per_second: float) -> Link:
    return Link(link.latency_seconds, bytes_per_second)


def _check_number(name: str, value: object, kind: str, meaning: str) -> None:
    """Refuse an argument that is no number; `meaning` is an example of one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}, received {quoted(value)}: {meaning}.")


def check_speed(name: str, speed: float) -> None:
    """Refuse the speed of a device that is out of range.

    Args:
        name: Of the argument or flag.
        speed: Its value.

    Raises:
        ValueError: If it is below `LEAST_SPEED` or above `MOST_SPEED`, or no number.

    Example:
        >>> check_speed("device_speed", 0)
        Traceback (most recent call last):
        ValueError: device_speed must be from 0.001 to 1000, received 0: 1.5 is a device that is 1.5 times as fast.
    """
    if not LEAST_SPEED <= speed <= MOST_SPEED:
        raise ValueError(f"{name} must be from {LEAST_SPEED:g} to {MOST_SPEED:g}, received {speed}: {_SPEED_MEANING}.")


def check_count(name: str, value: int, least: int, most: int) -> None:
    """Refuse an argument that is no whole number, or out of range.

    Args:
        name: Of the argument.
        value: Its value.
        least: The smallest value.
        most: The largest value.

    Example:
        >>> check_count("num_hosts", 0, 1, 512)
        Traceback (most recent call last):
        ValueError: num_hosts must be at least 1, received 0.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, received {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, received {value}.")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, received {value}.")

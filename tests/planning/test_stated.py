"""Devices and links that are stated in place of those measured."""

from __future__ import annotations

from typing import Any

import pytest

from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import MachineCosts
from tfpar.planning.stated import NETWORK_BYTES_PER_SECOND, Stated

MEASURED = MachineCosts("GPU", 2, 2, copy=Link(1e-5, 5e9), reduce={2: Link(2e-5, 4e9)}, memory_bytes=16 * 10**9)


def test_nothing_stated_changes_nothing() -> None:
    assert Stated().applied(MEASURED) == MEASURED


def test_what_is_stated_replaces_what_was_measured_and_is_named() -> None:
    machine = Stated(8, 2, 24 * 10**9, 1.5, 1e10).applied(MEASURED)
    assert (machine.num_devices, machine.num_hosts, machine.memory_bytes, machine.speed) == (8, 2, 24 * 10**9, 1.5)
    assert (machine.copy, machine.reduce[2]) == (Link(1e-5, 1e10), Link(2e-5, 1e10))
    assert machine.network.bytes_per_second == 1e10
    assert machine.assumed == ("memory 24.0 GB", "device speed 1.5", "bandwidth 10.0 GB/s")


def test_a_stated_bandwidth_holds_for_the_activations_of_divided_layers_too() -> None:
    measured = MachineCosts("GPU", 2, 2, exchange={2: Link(3e-5, 1e9)})
    assert Stated(bandwidth=1e10).applied(measured).exchange == {2: Link(3e-5, 1e10)}


def test_links_that_nobody_has_measured_or_stated_are_named_too() -> None:
    machine = Stated(num_devices=4, num_hosts=2).applied(MachineCosts("GPU", 1, 1))
    assert machine.network.bytes_per_second == NETWORK_BYTES_PER_SECOND
    assert machine.assumed == ("1.00 GB/s between devices", "1.25 GB/s between hosts")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_devices": 0}, "num_devices must be at least 1, received 0"),
        ({"num_devices": 10**6}, "num_devices must be at most 512, received 1000000"),
        ({"num_hosts": 0}, "num_hosts must be at least 1, received 0"),
        ({"device_speed": 0}, "device_speed must be from 0.001 to 1000, received 0: 1.5 is a device"),
        ({"device_speed": 1e-320}, "device_speed must be from 0.001 to 1000, received 1e-320"),
        ({"device_speed": 1e4}, "device_speed must be from 0.001 to 1000, received 10000.0"),
        ({"device_speed": float("nan")}, "device_speed must be from 0.001 to 1000, received nan"),
        ({"memory_bytes": 0}, "memory_bytes must be finite and at least 1, received 0"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be finite and at least 1, received nan"),
        ({"bandwidth": 0.0}, "bandwidth must be finite and at least 1 byte per second, received 0.0"),
        ({"bandwidth": 1e-320}, "bandwidth must be finite and at least 1 byte per second, received 1e-320"),
        ({"bandwidth": float("inf")}, "bandwidth must be finite and at least 1 byte per second, received inf"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Stated(**settings)


@pytest.mark.parametrize("value", [2.0, "2", True])
def test_counts_are_whole_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="num_devices must be a whole number"):
        Stated(num_devices=value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_speed": "2"}, "device_speed must be a number, received '2': 1.5 is a device that is 1.5 times as"),
        ({"device_speed": True}, "device_speed must be a number, received True"),
        ({"device_speed": None}, "device_speed must be a number, received None"),
        (
            {"memory_bytes": "24GiB"},
            r"memory_bytes must be a number of bytes, received '24GiB': 24 GiB is 24 \*",
        ),
        ({"bandwidth": "1GB/s"}, "bandwidth must be a number of bytes per second, received '1GB/s': 1 GB/s is 1e9"),
        ({"bandwidth": [1e9]}, "bandwidth must be a number of bytes per second, received "),
    ],
)
def test_texts_for_numbers_are_refused_in_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}") as refused:
        Stated(**settings)
    assert "\n" not in str(refused.value)

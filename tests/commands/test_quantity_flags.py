"""Sizes and bandwidths as flags."""

from __future__ import annotations

import pytest

from tfpar.commands.quantity_flags import Bandwidth, Size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("4096B", 4096),
        ("8kB", 8000), ("8KiB", 8192), ("1TB", 10**12), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_a_size_is_a_number_of_bytes(text: str, num_bytes: int) -> None:
    assert Size().parse(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_second"), [("10GB/s", 1e10), ("25Gbit/s", 3.125e9), ("100 MiB/s", 104857600), ("1bit/s", None)]
)
def test_a_bandwidth_is_in_bytes_or_bits_per_second(text: str, bytes_per_second: float | None) -> None:
    if bytes_per_second is None:
        with pytest.raises(ValueError, match="below a byte"):
            Bandwidth().parse(text)
    else:
        assert Bandwidth().parse(text) == bytes_per_second


# Gb is a gigabit to some and a gigabyte to others, and a bare number any unit.
@pytest.mark.parametrize(
    "text",
    [
        "", "24", "24G", "24Gb", "GiB", "-1GB", "0GB", "0.2B", "nan GB", "infGB", "1e3GB", "1_0GB", "٣GB", "24GB/s",
        "8Gbit", "9" * 16 + "B", "24 GB ", "24  GB", "24GB\n",
    ],
)  # fmt: skip
def test_other_texts_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"no quantity|below a byte"):
        Size().parse(text)


@pytest.mark.parametrize("text", ["10GB", "10", "10Gb/s", "10Gbps", "0GB/s", "-1GB/s", "10GB/h"])
def test_other_texts_are_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match=r"no quantity|below a byte"):
        Bandwidth().parse(text)

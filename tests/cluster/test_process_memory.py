"""The memory of this process, on Linux and elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfpar.cluster import process_memory


def test_the_peak_counts_from_the_last_reset() -> None:
    held = bytearray(64 << 20)
    before_bytes = process_memory.peak_bytes()
    del held
    process_memory.reset_peak()
    assert process_memory.peak_bytes() < before_bytes - (32 << 20)


def test_a_system_without_proc_has_its_largest_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STATM", "_STATUS"):
        monkeypatch.setattr(process_memory, name, Path("/no/such/file"))
    assert process_memory.resident_bytes() == process_memory.peak_bytes() > 1 << 20

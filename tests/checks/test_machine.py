"""The checks of a machine without TensorFlow, and their report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfpar.checks import machine, report
from tfpar.checks.report import Check, exit_code
from tfpar.cluster.gpu import gpus


@pytest.mark.parametrize(("free", "status"), [(8 << 20, "ok"), (1 << 20, "slow")])
def test_little_free_memory_is_slow(free: int, status: str, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {free} kB\n")
    check = machine.memory(tmp_path)
    assert check.status == status
    assert f"{(free << 10) / 1e9:.1f} GB of 17.2 GB free" in check.figure
    assert machine.memory(tmp_path / "nowhere").status == "skipped"


def test_a_small_shared_memory_matters_to_several_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 << 20

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage)
    assert machine.shared_memory(is_needed=False).status == "ok"
    check = machine.shared_memory(is_needed=True)
    assert (check.status, "--shm-size" in check.way_out) == ("WRONG", True)


@pytest.mark.parametrize(
    "module",
    [
        "NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U22-I3)",
    ],
    ids=["closed", "open"],
)
def test_the_driver_is_read(tmp_path: Path, module: str) -> None:
    assert machine.driver({"PATH": ""}, tmp_path).status == "skipped"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(f"NVRM version: {module}  Tue Mar  5 22:23:56 UTC 2024\n")
    assert machine.driver({"PATH": ""}, tmp_path).figure == "NVIDIA 550.54.15"


def test_a_gpu_that_others_fill_is_slow() -> None:
    found = gpus.VisibleGpus((gpus.Gpu("0", "GPU-1", 100, 80000), gpus.Gpu("1", "GPU-2", 70000, 80000), gpus.Gpu("2")))
    assert [(check.name, check.status) for check in machine.gpu_memory(found)] == [
        ("memory of GPU 0", "ok"),
        ("memory of GPU 1", "slow"),
    ]


CHECKS = [
    Check("versions", "ok", "tfpar 0.1.0"),
    Check("copy GPU:0 to GPU:1", "WRONG", "words " * 300, "equal bits", "Switch peer-to-peer copies off. " * 3),
    Check("a name that is longer than its column", "slow", "12 ms", values={"seconds": 0.012}),
    Check("memory", "ok", "x" * 200),
]


def test_no_line_is_longer_than_80_columns() -> None:
    text = "\n".join([*map(str, CHECKS), report.summary(CHECKS), report.issue_block(CHECKS)])
    assert max(map(len, text.splitlines())) <= 80
    assert "-> Switch peer-to-peer copies off." in text


def test_the_block_for_an_issue_holds_what_is_not_ok_and_the_versions() -> None:
    block = report.issue_block(CHECKS)
    assert block.startswith("```text\nok      versions")
    assert "WRONG   copy GPU:0 to GPU:1" in block
    assert "memory" not in block
    assert block.endswith("4 checks: 2 ok, 1 slow, 1 WRONG.\n```")


def test_the_exit_code_is_that_of_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    assert [exit_code(CHECKS[:1]), exit_code(CHECKS[2:]), exit_code(CHECKS)] == [0, 1, 2]
    assert report.reported(CHECKS, "json") == CHECKS
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == 2
    assert printed["checks"][2]["values"] == {"seconds": 0.012}

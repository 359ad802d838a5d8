"""The GPUs that a process may use: CUDA_VISIBLE_DEVICES, nvidia-smi, or the folder of the driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stand_ins
from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpus import Gpu

FIRST, SECOND = stand_ins.uuid(0), stand_ins.uuid(1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", ("0",)),
        ("3, 1,2", ("3", "1", "2")),
        (f"{FIRST},1", (FIRST, "1")),
        ("MIG-GPU-8f3c/1/0,MIG-0c757cd7-e942", ("MIG-GPU-8f3c/1/0", "MIG-0c757cd7-e942")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", ("1",)),
        ("1,2,", ("1", "2")),
    ],
)
def test_the_users_list_is_read_as_cuda_reads_it(value: str, expected: tuple[str, ...]) -> None:
    assert gpus.named_in({"CUDA_VISIBLE_DEVICES": value}) == expected
    assert gpus.named_in({}) is None


@pytest.mark.parametrize("value", ["cuda:0", "0,0", "0 1", "GPU:0", "\u0663", "x" * 10_000])
def test_a_list_that_cuda_would_ignore_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES must list different GPUs by number, or by UUID") as why:
        gpus.named_in({"CUDA_VISIBLE_DEVICES": value})
    assert "unset it to use all GPUs." in str(why.value)
    assert len(str(why.value)) < 300


def test_the_rows_of_nvidia_smi_are_gpus_and_other_lines_are_none() -> None:
    text = stand_ins.table(1, 512) + f"1, {SECOND}, [N/A], [Insufficient Permissions]\nNo devices were found\n"
    assert gpus.parse(text) == (Gpu("0", FIRST, 512, 81559), Gpu("1", SECOND))


def test_all_gpus_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    found = gpus.find({"PATH": stand_ins.nvidia_smi(tmp_path, stand_ins.table(2))})
    assert [gpu.name for gpu in found.gpus] == ["0", "1"]
    assert (found.is_users, found.problem) == (False, "")


def test_the_users_own_list_is_kept_and_nvidia_smi_adds_the_memory(tmp_path: Path) -> None:
    path = stand_ins.nvidia_smi(tmp_path, stand_ins.table(3, 512))
    found = gpus.find({"PATH": path, "CUDA_VISIBLE_DEVICES": f"2,{FIRST[:12]},MIG-1"})
    assert found.gpus == (Gpu("2", stand_ins.uuid(2), 512, 81559), Gpu(FIRST[:12], FIRST, 512, 81559), Gpu("MIG-1"))
    assert found.is_users


def test_a_hidden_machine_is_not_asked(tmp_path: Path) -> None:
    path = stand_ins.nvidia_smi(tmp_path, "", before=f"touch {tmp_path}/asked")
    assert gpus.find({"PATH": path, "CUDA_VISIBLE_DEVICES": ""}) == gpus.VisibleGpus((), is_users=True)
    assert not (tmp_path / "asked").exists()


def test_a_number_that_no_gpu_has_is_refused(tmp_path: Path) -> None:
    path = stand_ins.nvidia_smi(tmp_path, stand_ins.table(2))
    rule = "CUDA_VISIBLE_DEVICES must name GPUs of this machine, received '0,7': nvidia-smi lists 2, numbered from 0"
    with pytest.raises(ValueError, match=re.escape(rule)):
        gpus.find({"PATH": path, "CUDA_VISIBLE_DEVICES": "0,7"})


def test_numbers_of_different_gpus_are_not_matched_unless_the_order_is_the_same(tmp_path: Path) -> None:
    text = f"0, {FIRST}, 5 MiB, 8192 MiB\n1, {SECOND}, 5 MiB, 81559 MiB\n"
    environment = {"PATH": stand_ins.nvidia_smi(tmp_path, text), "CUDA_VISIBLE_DEVICES": "0"}
    assert gpus.find(environment).gpus == (Gpu("0"),), "CUDA's number 0 is the fastest"
    assert gpus.find({**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).gpus == (Gpu("0", FIRST, 5, 8192),)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder for two GPUs, of which one does not give its UUID."""
    for bus, text in (("0000:65:00.0", "Model: ?\n"), ("0000:17:00.0", f"Model: A\nGPU UUID: \t {FIRST}\n")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(text)
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    return tmp_path


def test_without_nvidia_smi_the_driver_lists_the_gpus(driver: Path) -> None:
    assert gpus.find({"PATH": "/nowhere"}).gpus == (Gpu("0", FIRST), Gpu("1"))


def test_a_failing_nvidia_smi_is_named_and_the_driver_lists_the_gpus(driver: Path) -> None:
    path = stand_ins.nvidia_smi(driver, "Failed to initialize NVML: Driver/library version mismatch\nNVML 1\n", code=18)
    found = gpus.find({"PATH": path})
    assert len(found.gpus) == 2
    assert found.problem == "nvidia-smi failed (Failed to initialize NVML: Driver/library version mismatch)"


def test_an_nvidia_smi_that_hangs_is_not_waited_for(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "TIME_LIMIT_SECONDS", 0.2)
    path = stand_ins.nvidia_smi(driver, "", before="exec /bin/sleep 60")
    found = gpus.find({"PATH": path})
    assert len(found.gpus) == 2
    assert found.problem == "nvidia-smi did not answer within 0.2 s"


def test_a_machine_without_gpus_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    assert gpus.find({"PATH": "/nowhere"}) == gpus.VisibleGpus(())


def test_a_list_on_a_machine_without_gpus_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    environment = {"PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": "0"}
    assert gpus.find(environment) == gpus.VisibleGpus(())
    no_devices = stand_ins.nvidia_smi(tmp_path, "No devices were found\n")
    assert gpus.find({**environment, "PATH": no_devices}) == gpus.VisibleGpus(())
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert gpus.find(environment) == gpus.VisibleGpus((Gpu("0"),), is_users=True)


def test_a_gpu_has_the_same_identity_in_every_process_of_its_machine(driver: Path) -> None:
    environment = {"PATH": stand_ins.nvidia_smi(driver, stand_ins.table(2))}
    assert gpus.identities(environment) == [FIRST, SECOND]
    assert gpus.identities({**environment, "CUDA_VISIBLE_DEVICES": "1"}) == [SECOND]
    host = os.uname().nodename
    assert gpus.identities({"PATH": "", "CUDA_VISIBLE_DEVICES": "3"}) == [f"{host}/3"]
    assert gpus.identities({"PATH": "", "CUDA_VISIBLE_DEVICES": "cuda:0"}) == []


def test_the_search_imports_no_tensorflow() -> None:
    program = "import sys; from tfpar.cluster.gpu import gpus; gpus.find({}); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

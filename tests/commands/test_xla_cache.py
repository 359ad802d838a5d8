"""Compilations of XLA are kept in the folder of a run, and a resumed run does not compile again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tfpar.commands import xla_cache

FLAG = "--tf_xla_persistent_cache_directory"
SETTINGS = ("training.jit_compile=true", "trainer=tfpar.trainers.regression.Regression", "model.name=linear")
SETTINGS += ("strategy.kind=single_device", "data.source=generated", "data.num_examples=64")


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "")


def folder_in_flags() -> Path:
    return Path(os.environ["TF_XLA_FLAGS"].partition(f'{FLAG}="')[2].removesuffix('"'))


def test_flags_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=0")
    xla_cache.keep_in(tmp_path)
    assert os.environ["TF_XLA_FLAGS"].startswith(f'--tf_xla_auto_jit=0 {FLAG}="{tmp_path}/')
    monkeypatch.setenv("TF_XLA_FLAGS", f"{FLAG}=/mine")
    xla_cache.keep_in(tmp_path)
    assert os.environ["TF_XLA_FLAGS"] == f"{FLAG}=/mine"


def test_each_kind_of_machine_has_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = []
    for number, (processor, card) in enumerate([("a", "L4"), ("a", "H200"), ("b", "L4"), ("a", "L4")]):
        root = tmp_path / str(number)
        (root / "proc/driver/nvidia/gpus/0").mkdir(parents=True)
        (root / "proc/cpuinfo").write_text(f"cpu MHz : {number}\nmodel name : {processor}\nflags : avx\n")
        (root / "proc/driver/nvidia/gpus/0/information").write_text(f"Model: {card}\nGPU UUID: {number}\n")
        monkeypatch.setenv("TF_XLA_FLAGS", "")
        xla_cache.keep_in(tmp_path / "xla", root)
        folders.append(folder_in_flags())
    assert folders[0] == folders[3]
    assert len(set(folders)) == 3


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_resumed_run_does_not_compile_again(tmp_path: Path) -> None:
    """Its folder may have any name."""
    counts = []
    for epochs in (1, 2):
        settings = [f"--set={one}" for one in (*SETTINGS, f"training.epochs={epochs}")]
        command = [sys.executable, "-m", "tfpar.train", "--directory", str(tmp_path / 'a "run"'), *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        counts.append(len(list(tmp_path.glob("*/xla/*/*"))))
    assert counts[0] == counts[1] > 0

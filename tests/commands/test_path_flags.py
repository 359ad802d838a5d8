"""Files and folders as flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT
from tfpar.commands.path_flags import FilePath


@pytest.mark.parametrize(("text", "path"), [("~/runs", "/home/me/runs"), ("runs/~", "runs/~"), ("", ""), (".", ".")])
def test_a_tilde_at_the_beginning_is_the_home_folder(text: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert FilePath().parse(text) == path


@pytest.mark.parametrize("command", [["train", "--print_config"], ["plan"], ["doctor"]], ids=lambda words: words[0])
def test_a_configuration_in_the_home_folder_is_found(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[training]\nepochs = 0\n")
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    name, *others = command
    result = subprocess.run(
        [sys.executable, "-m", f"tfpar.{name}", "--config=~/mine.toml", *others],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "training.epochs = 0 must be" in result.stdout + result.stderr

"""`python -m tfpar.doctor` and `tfpar.doctor()` on a machine without GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tfpar
from tests import ROOT

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfpar.doctor", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_a_machine_without_gpus_says_so_and_checks_the_rest(tmp_path: Path) -> None:
    ended = run("--json", "--logical_cpus", "3", folder=tmp_path)
    assert ended.stderr == ""
    found = json.loads(ended.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["driver"]["status"] == "skipped"
    assert checks["devices"]["figure"] == "no GPU: TensorFlow runs on the CPU"
    assert [checks[f"CPU:{number}"]["status"] for number in range(3)] == ["ok"] * 3
    assert "6 ordered pairs" in checks["copies"]["figure"]
    assert "reduction to one device" in checks["all-reduce"]["figure"]
    assert ended.returncode == found["exit_code"] < 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["now"], "Arguments must be flags, received 'now'."),
        (["--logical_cpus", "0"], "--logical_cpus must be at least 1"),
        (["--jsn"], "--jsn is no flag. Did you mean --json?"),
    ],
)
def test_wrong_flags_end_with_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    ended = run(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_doctor(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfpar.doctor"]
    # After kill -9 its folder of temporary files remains.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        while b"/dev/shm" not in one.stdout.readline():  # the next check starts a process
            pass
        time.sleep(1.0)
        one.send_signal(number)
        _, err = one.communicate(timeout=30)
    assert (one.returncode, err.decode()) == ((130, "Interrupted.\n") if number == signal.SIGINT else (-number, ""))


def test_the_function_returns_the_checks_and_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    checks = tfpar.doctor(num_logical_cpus=1)
    shown = capsys.readouterr().out
    assert all(check.name in shown for check in checks)
    assert [check.status for check in checks if check.name in ("speed", "copies", "all-reduce")] == ["skipped"] * 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "digits", "--model", "a.py:b"], "--model and --config each name a model."),
        (["--data", "a.py:b"], "--data needs --model"),
        (["--set", "strategy.kind=mirrored"], "--set changes a setting of --config or --model"),
        (["--config", "digits", "--set", "strategy.kind=no"], "strategy"),
        (["--config", "digts"], "digits"),
        (["--model", "a.py:b", "--set", "training.epochs=3"], "only settings of strategy can be changed"),
    ],
)
def test_wrong_descriptions_of_a_model_end_with_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    ended = run(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr

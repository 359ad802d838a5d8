"""`python -m tfpar.doctor` and `tfpar.doctor()` on a machine without GPUs."""

from __future__ import annotations

import contextlib
import importlib
import io
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
from tests.support import doctor_models

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


@pytest.mark.extended
def test_a_machine_without_gpus_says_so_and_checks_the_rest(tmp_path: Path) -> None:
    ended = run("--json", "--logical_cpus", "1", folder=tmp_path)
    assert ended.stderr == ""
    printed = json.loads(ended.stdout)
    checks = {check["name"]: check for check in printed["checks"]}
    assert checks["devices"]["figure"] == "no GPU: TensorFlow runs on the CPU"
    assert checks["CPU:0"]["status"] == "ok"
    skipped = [name for name, check in checks.items() if check["status"] == "skipped"]
    assert skipped == ["driver", "speed", "copies", "all-reduce", "model"]
    assert ended.returncode == printed["exit_code"] < 2
    assert list(tmp_path.iterdir()) == []


def test_a_model_runs_on_every_device() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        listed = tfpar.doctor(doctor_models.classifier, num_workers=2)
    assert all(check.name in shown.getvalue() for check in listed)
    checks = {check.name: check for check in listed}
    right = ("devices", "CPU:0", "CPU:1", "copies", "all-reduce", "model", "model on CPU:0", "model on CPU:1")
    right = (*right, "versions of workers", "ports")
    assert {name: checks[name].status for name in right} == dict.fromkeys(right, "ok")
    assert checks["CPU:0"].figure.startswith("product, convolution, XLA right")
    assert "2 ordered pairs" in checks["copies"].figure
    assert "reduction to one device" in checks["all-reduce"].figure
    assert "the CPU in float64" in checks["model on CPU:1"].figure


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["now"], "Arguments must be flags, received 'now'."),
        (["--logical_cpus", "0"], "--logical_cpus must be at least 1"),
        (["--jsn"], "--jsn is no flag. Did you mean --json?"),
        (["--config", "digits", "--model", "a.py:b"], "--model and --config each name a model."),
        (["--data", "a.py:b"], "--data needs --model"),
        (["--set", "strategy.kind=mirrored"], "--set changes a setting of --config"),
        (["--config", "digits", "--set", "strategy.kind=no"], "strategy"),
        (["--config", "digts"], "digits"),
        (["--model", "a.py:b", "--set", "training.epochs=3"], "A model function has no settings"),
    ],
)
def test_wrong_flags_end_with_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    ended = run(*arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_doctor(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfpar.doctor"]
    # After kill -9 its temporary file remains.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        while b"/dev/shm" not in process.stdout.readline():  # the next check starts a process
            pass
        time.sleep(1.0)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    ended = (130, "Interrupted.\n") if number == signal.SIGINT else (-number, "")
    assert (process.returncode, err.decode()) == ended


def test_the_function_is_a_function_after_an_import_of_the_command() -> None:
    command = importlib.import_module("tfpar.doctor")
    assert callable(tfpar.doctor)
    assert command.doctor is importlib.import_module("tfpar.checks.doctor").doctor

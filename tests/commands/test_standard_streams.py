"""Standard output and error that are closed, full or without a reader, and Ctrl-C while a command imports."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import command, launching
from tests.support.command import metrics, settings
from tfpar.commands import start_up

COMMANDS = {
    "list": ["-m", "tfpar"],
    "help": ["-m", "tfpar.launch", "--help"],
    "configuration": ["-m", "tfpar.train", "--print_config"],
    "batch script": ["-m", "tfpar.launch", "--num_workers", "2", "--print", "slurm", "--", "--config", "digits"],
    "refusal": ["-m", "tfpar.train", "--config", "nothing"],
}
SLEEPS = "import pathlib, time; pathlib.Path('importing').touch(); time.sleep(60)"


def shell(arguments: Sequence[str], redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments and a redirection of the shell."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{command.ROOT}"}
    return subprocess.run(
        ["bash", "-c", f'"$0" "$@" {redirection}', sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("redirection", ["<&- >&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_changes_nothing(name: str, redirection: str, tmp_path: Path) -> None:
    ended = shell(COMMANDS[name], redirection, tmp_path)
    assert ended.returncode == (1 if name == "refusal" else 0), ended
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("name", ["list", "help", "configuration", "batch script"])
def test_unprintable_output_is_an_error_in_one_sentence(name: str, tmp_path: Path) -> None:
    ended = shell(COMMANDS[name], "> /dev/full", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["list", "help", "configuration", "batch script"])
def test_a_command_without_a_reader_ends_as_if_by_sigpipe(name: str, tmp_path: Path) -> None:
    unread, written = os.pipe()
    os.close(unread)
    environment = {**os.environ, "PYTHONPATH": str(command.ROOT)}
    process = subprocess.run(
        [sys.executable, *COMMANDS[name]],
        cwd=tmp_path,
        env=environment,
        stdout=written,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(written)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize("module", ["pydantic", "tensorflow"], ids=["own modules", "TensorFlow"])
def test_ctrl_c_during_the_imports_ends_the_command_at_once(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(SLEEPS)
    process = subprocess.Popen(
        [sys.executable, "-m", "tfpar.train", "--directory", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{command.ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    launching.wait_until((tmp_path / "importing").exists, "the import")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"", b"Interrupted.\n")


def test_a_script_without_standard_error_imports_tensorflow(tmp_path: Path) -> None:
    eager = tmp_path / "tensorflow" / "python" / "eager"
    eager.mkdir(parents=True)
    (eager / "context.py").write_text("class Context: _compute_gpu_options = None")  # memory growth replaces it
    (tmp_path / "tensorflow" / "__init__.py").write_text(
        "import os, types; config = types.SimpleNamespace(list_physical_devices=lambda: os.system('echo x >&2'))"
    )
    for redirection in ("2>&-", "2> /dev/full"):
        ended = shell(["-c", "import tfpar, tensorflow; print('imported')"], redirection, tmp_path)
        assert (ended.returncode, ended.stdout) == (0, "imported\n"), redirection


def test_other_processes_than_the_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for original, own, is_command in [
        (["python", "-m", "tfpar.train", "--x"], ["-m", "--x"], True),
        (["python", "-X", "dev", "-mtfpar.launch"], ["-m"], True),
        (["python", "-m", "tfpar"], ["-m"], True),
        (["python", "/x/bin/tfpar-train", "-m"], ["/x/bin/tfpar-train", "-m"], True),
        (["python", "-m", "pytest", "tfpar.train"], ["-m", "tfpar.train"], False),
        (["python", "script.py", "-m", "tfpar.train"], ["script.py", "-m", "tfpar.train"], False),
        (["python"], [""], False),
    ]:
        monkeypatch.setattr(sys, "orig_argv", original)
        monkeypatch.setattr(sys, "argv", own)
        assert start_up.is_command() == is_command, original


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_training_without_a_reader_ends_and_resumes(tmp_path: Path) -> None:
    small = ["--config", str(command.ROOT / "configs" / "regression_small.toml"), "--directory", "run"]
    stopped = shell(["-m", "tfpar.train", *small, *settings("training.epochs=3")], "| head -1", tmp_path)
    assert "Traceback" not in stopped.stderr
    resumed = shell(["-m", "tfpar.train", *small, *settings("training.epochs=3")], "", tmp_path)
    assert resumed.returncode == 0, resumed
    assert len(metrics(tmp_path / "run")) == 3


# Jobs


@pytest.mark.multi_process
@pytest.mark.parametrize("redirection", [">&-", "> /dev/full", "2> /dev/full", ">&- 2>&-"])
def test_a_job_continues_without_its_output(redirection: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('x' * 100, flush=True); open(f'done-{os.getpid()}', 'w')")
    ended = shell(["-m", "tfpar.launch", "--num_workers", "2", "--", "script.py"], redirection, tmp_path)
    assert ended.returncode == 0, ended
    assert len(list(tmp_path.glob("done-*"))) == 2
    assert "Traceback" not in ended.stderr
    assert ("its lines are lost" in ended.stderr) == (redirection == "> /dev/full")

"""The parts of the launcher that need no process: lines, cores, addresses, the command's flags, requests to stop."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from tfpar import launch
from tfpar.launcher import job, stop_signals
from tfpar.launcher.log_output import Sink
from tfpar.launcher.stop_signals import StopSignals
from tfpar.launcher.worker import Lines, worker_cores, worker_environment


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"on", b"e\nt", b"wo"], [b"one", b"two"]),
        ([b"one\r\ntwo\r\n"], [b"one", b"two"]),
        ([b"one\r", b"\ntwo"], [b"one", b"two"]),
        ([b"10%\r20%\r"], [b"10%", b"20%"]),
        ([b"\r10%", b"\r20%", b"\n"], [b"10%", b"20%"]),
        ([b"a\n\nb\n"], [b"a", b"", b"b"]),
        ([b"a\r", b"\n", b"\nb"], [b"a", b"", b"b"]),
    ],
)
def test_bytes_are_cut_into_lines(parts: list[bytes], expected: list[bytes]) -> None:
    lines = Lines()
    assert [line for part in parts for line in lines.feed(part)] + lines.rest() == expected


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = Lines()
    passed_on = [line for _ in range(100) for line in lines.feed(b"x" * 10_000)] + lines.rest()
    assert b"".join(passed_on) == b"x" * 1_000_000
    assert max(map(len, passed_on)) < 100_000


@pytest.mark.parametrize(
    ("num_workers", "cores_per_worker", "available", "expected"),
    [
        (2, 1, [0, 1], [[0], [1]]),
        (2, 2, [0, 1, 4, 5, 6], [[0, 1], [4, 5]]),
        (3, 1, [0, 1], [[0, 1]] * 3),
        (2, 2, [0, 1, 2], [[0, 1, 2]] * 2),
    ],
)
def test_cores_are_apart_where_there_are_enough(
    num_workers: int, cores_per_worker: int, available: list[int], expected: list[list[int]]
) -> None:
    assert [worker_cores(rank, num_workers, cores_per_worker, available) for rank in range(num_workers)] == expected


def test_the_environment_of_a_worker_keeps_the_users_variables() -> None:
    given = {"PATH": "/bin", "TF_NUM_INTRAOP_THREADS": "3"}
    environment = worker_environment(1, ["127.0.0.1:1", "127.0.0.1:2"], 4, "new", given)
    assert environment["TFPAR_JOB_SECRET"] == "new"
    own = {"TFPAR_JOB_SECRET": "own"}
    assert worker_environment(0, ["127.0.0.1:1"], 4, "new", own)["TFPAR_JOB_SECRET"] == "own"
    assert environment["PATH"] == "/bin"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["TF_NUM_INTRAOP_THREADS"] == "3"
    assert environment["TF_NUM_INTEROP_THREADS"] == environment["OMP_NUM_THREADS"] == "4"
    assert '"index": 1' in environment["TF_CONFIG"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (130, 130), (-9, 137), (-15, 143)])
def test_exit_codes_are_as_shells_report_them(code: int, expected: int) -> None:
    assert job.exit_code(code) == expected


def test_only_a_later_ctrl_c_means_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = StopSignals()
    asked.note(signal.SIGTERM)
    asked.note(signal.SIGINT)
    assert (asked.stop, asked.at_once) == (signal.SIGTERM, False), "one signal that is sent twice"
    now_seconds = time.monotonic()
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now_seconds + 1)
    asked.note(signal.SIGTERM)
    assert not asked.at_once, "schedulers ask again; the checkpoint is still wanted"
    asked.note(signal.SIGINT)
    assert (asked.stop, asked.at_once) == (signal.SIGTERM, True)


def test_signals_are_heard_and_handed_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        asked.read()
        assert asked.stop == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            asked.read()
            assert asked.stop is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_a_full_disk_no_output_is_buffered() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        sink = Sink(descriptor)
        sink.write_line(b"lost")
        sink.write_some(4)
        sink.write_line(b"lost as well")
        assert sink.is_broken
        assert sink.is_empty
    finally:
        os.close(descriptor)


def test_the_command_of_a_worker(tmp_path: Path) -> None:
    script = str(tmp_path / "own.py")
    Path(script).touch()
    assert launch.worker_arguments([]) == ["-m", "tfpar.train"]
    assert launch.worker_arguments(["--config", "a.toml"]) == ["-m", "tfpar.train", "--config", "a.toml"]
    assert launch.worker_arguments(["-m", "own.module", "--x"]) == ["-m", "own.module", "--x"]
    assert launch.worker_arguments([script, "--x"]) == [script, "--x"]
    for wrong in (["own"], ["-m"], ["-c", "pass"]):
        with pytest.raises(ValueError, match=r"After -- comes a flag of tfpar.train such as --config"):
            launch.worker_arguments(wrong)
    with pytest.raises(ValueError, match=r"missing\.py: there is no such file in .*Give the path of the script\."):
        launch.worker_arguments(["missing.py"])


GRACE_RULE = "--grace_seconds must be from 0 to 604800 (a week)"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--num_workers is not set. Say how many workers to start, such as --num_workers 2."),
        (["--num_workers", "0"], "--num_workers must be at least 1, received 0."),
        (["--num_workers", "2", "--cores_per_worker", "0"], "--cores_per_worker must be at least 1, received 0."),
        (["--num_workers", "2", "--gpus_per_worker", "-1"], "--gpus_per_worker must be at least 0, received -1."),
        (["--num_workers", "2", "--gpus_per_worker", "257"], "--gpus_per_worker must be at most 256, received 257."),
        (["--num_workers", "2", "--max_restarts", "-1"], "--max_restarts must be at least 0, received -1."),
        (["--num_workers", "2", "--grace_seconds", "-1"], f"{GRACE_RULE}, received -1."),
        (["--num_workers", "2", "--grace_seconds", "nan"], f"{GRACE_RULE}, received nan."),
        (["--num_workers", "2", "--hosts", "a,b", "--print", "slurm"], "--print starts none. Leave one out"),
        (["--num_workers", "2", "--host", "1"], "which is not set"),
        (["--num_workers", "2", "--hosts", "a,b,c"], "no multiple of the 3 hosts"),
        (
            ["--num_workers", "2", "--print", "pbs"],
            "--print must be one of slurm, jobset, trainjob, tfjob, received 'pbs'.",
        ),
    ],
)
def test_a_wrong_flag_is_refused(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with flagsaver.flagsaver():
        assert launch.main(flags.FLAGS(["tfpar.launch", *arguments])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


def test_a_job_within_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    with flagsaver.flagsaver():
        assert launch.main(flags.FLAGS(["tfpar.launch", "--num_workers", "2"])) == 1
    assert "error: TF_CONFIG must not be set: this process belongs to a job already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("slurm", "#SBATCH --ntasks=3"),
        ("jobset", "kind: JobSet"),
        ("trainjob", "kind: TrainJob"),
        ("tfjob", "kind: TFJob"),
    ],
)
def test_the_script_or_manifest_for_a_cluster_is_printed(
    kind: str, sign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with flagsaver.flagsaver():
        parsed = flags.FLAGS(["tfpar.launch", "--num_workers", "3", "--cores_per_worker", "5", "--print", kind])
        assert launch.main([*parsed, "--config", "own.toml"]) == 0
    out, err = capsys.readouterr()
    assert sign in out
    assert "own.toml" in out
    assert sys.executable not in out
    assert err == ""

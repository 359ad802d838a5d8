"""`python -m tfpar.launch` with small scripts as workers: outputs, failures, restarts, requests to stop, no orphans."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import ranked, run, started, wait_until
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]

# A worker that saves when it is asked to stop, as the train command does.
SAVES = """
def save(number, frame):
    with open(f"saved-{rank}", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("works")
sign("ready")
time.sleep(60)
"""
# One that does not hear of it.
DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sign("ready", str(os.getpid()))
"""


def last_words(err: str) -> str:
    """What the launcher itself has said."""
    return "\n".join(line.removeprefix("[launch] ") for line in err.splitlines() if line.startswith("[launch]"))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_know_their_places_and_lines_carry_the_rank(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, 'print(json.dumps(place)); print("grief", file=sys.stderr)', num_workers=3)
    assert (code, last_words(err)) == (0, "")
    assert sorted(err.splitlines()) == ["[0] grief", "[1] grief", "[2] grief"]
    places = [json.loads(ranked(out, rank)[0]) for rank in range(3)]
    assert [place["task"] for place in places] == [{"type": "worker", "index": rank} for rank in range(3)]
    addresses = places[0]["cluster"]["worker"]
    assert all(place["cluster"] == {"worker": addresses} for place in places)
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


def test_cores_are_divided_and_the_users_own_thread_settings_stay(tmp_path: Path) -> None:
    script = """
print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ["TF_NUM_INTRAOP_THREADS"],
                  os.environ["TF_NUM_INTEROP_THREADS"], os.environ["OMP_NUM_THREADS"]]))
"""
    num_cores = len(os.sched_getaffinity(0))
    code, out, err = run(tmp_path, script, variables={"OMP_NUM_THREADS": "7"})
    assert code == 0, err
    (cores, *threads), (other_cores, *other_threads) = (json.loads(ranked(out, rank)[0]) for rank in range(2))
    share = str(max(1, num_cores // 2))
    assert threads == other_threads == [share, share, "7"]
    if num_cores > 1:
        assert not set(cores) & set(other_cores)
        assert len(cores) == len(other_cores) == num_cores // 2


def test_no_output_is_lost_or_merged(tmp_path: Path) -> None:
    script = """
for number in range(20000):
    print(f"line {number}")
for part in ("10%\\r", "20%\\r", "\\r30%", "\\r\\n", "caf\\u00e9 without an end"):
    sys.stderr.write(part)
    sys.stderr.flush()
    time.sleep(0.02)
"""
    code, out, err = run(tmp_path, script)
    assert code == 0
    for rank in range(2):
        assert ranked(out, rank) == [f"line {number}" for number in range(20000)]
        assert ranked(err, rank) == ["10%", "20%", "30%", "café without an end"]


def test_the_first_failure_stops_all_and_is_summed_up(tmp_path: Path) -> None:
    script = """
sign("ready")
if rank == 1:
    wait("ready-0")
    print(*range(30), sep="\\n")
    sys.exit("the reason")
time.sleep(60)
"""
    began = time.monotonic()
    code, out, err = run(tmp_path, script)
    assert code == 1
    assert time.monotonic() - began < 5, "the other is stopped at once"
    assert ranked(out, 1) == [str(number) for number in range(30)]
    said = last_words(err).splitlines()
    assert said[:2] == [
        "The job failed: worker 1 failed with exit code 1. It was the first to fail.",
        "The last 20 lines of worker 1:",
    ]
    assert len(said) == 22
    assert {"  29", "  the reason"} < set(said)


def test_a_killed_worker_is_blamed_rather_than_the_peers_that_miss_it(tmp_path: Path) -> None:
    script = """
sign("ready", str(os.getpid()))
if rank == 0:
    wait("ready-1")
    victim = int(Path("ready-1").read_text())
    os.kill(victim, signal.SIGKILL)
    sys.exit("UnavailableError")
time.sleep(60)
"""
    code, _, err = run(tmp_path, script)
    assert code == 137, err
    assert "worker 1 was killed by SIGKILL. It was the first to fail." in last_words(err)
    assert "Worker 1 has no output." in last_words(err)


def test_a_suspended_worker_is_named_and_ended(tmp_path: Path) -> None:
    script = (
        """
if rank == 0:
    wait("ready-1")
    still = int(Path("ready-1").read_text())
    while Path(f"/proc/{still}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    sys.exit(4)
"""
        + DEAF.replace('sign("ready"', 'sign("ready"')
        + "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)\n"
    )
    code, _, err = run(tmp_path, script, "--grace_seconds", "0.2")
    assert code == 4
    said = last_words(err)
    assert "worker 0 failed with exit code 4 while worker 1 was suspended (state T, as after SIGSTOP)." in said
    assert "Look first at the suspended worker" in said
    assert not is_alive(int((tmp_path / "ready-1").read_text()))


def test_a_worker_that_ends_early_without_an_error_is_named(tmp_path: Path) -> None:
    script = """
if rank == 0:
    sign("done", str(os.getpid()))
    sys.exit(0)
wait("done-0")
while Path(f"/proc/{int(Path('done-0').read_text())}").exists():
    time.sleep(0.01)
sys.exit("UnavailableError")
"""
    code, _, err = run(tmp_path, script)
    assert code == 1
    said = last_words(err).splitlines()
    assert said[0] == (
        "The job failed: worker 1 failed with exit code 1 after worker 0 had ended with exit code 0. "
        "It was the first to fail."
    )
    assert said[1] == "A worker that ends early, as by sys.exit(0) in a callback, lets the others wait in vain."


def test_restarts_until_it_works_with_new_ports(tmp_path: Path) -> None:
    script = """
def num_starts():
    return len(Path("starts-1").read_text().splitlines()) if Path("starts-1").exists() else 0
if rank == 1:
    with open("starts-1", "a") as file:
        file.write(",".join(place["cluster"]["worker"]) + "\\n")
    if num_starts() < 3:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), signal.SIGSEGV)
while num_starts() < 3:
    time.sleep(0.01)
"""
    code, _, err = run(tmp_path, script, "--max_restarts", "5")
    assert code == 0, err
    assert last_words(err).splitlines() == [
        "Restart 1 of 5, because worker 1 was killed by SIGSEGV.",
        "Restart 2 of 5 after a pause of 1 s, because worker 1 was killed by SIGSEGV.",
    ]
    assert len(set((tmp_path / "starts-1").read_text().splitlines())) == 3, "each start has its own ports"


def test_restarts_at_most_as_often_as_said(tmp_path: Path) -> None:
    script = 'open(f"starts-{rank}", "a").write("x"); sys.exit(5)'
    code, _, err = run(tmp_path, script, "--max_restarts", "2", num_workers=1)
    assert code == 5
    assert (tmp_path / "starts-0").read_text() == "xxx"
    assert last_words(err).count("Restart ") == 2
    assert "The job failed: worker 0 failed with exit code 5." in last_words(err)


def test_a_script_that_misses_another_worker_is_not_blamed_for_ending_first(tmp_path: Path) -> None:
    script = """
if rank == 1:
    print(f"tfpar.WorkerLostError: {LOST}: 127.0.0.1:1 no longer responds.", file=sys.stderr)
    sys.exit(1)
time.sleep(0.5)
sys.exit("the cause")
"""
    code, _, err = run(tmp_path, f"from tfpar.cluster.other_worker_error import LOST\n{script}")
    assert code == 1
    said = last_words(err)
    assert "The job failed: worker 0 failed with exit code 1. It was the first to fail." in said
    assert "the cause" in said


def test_a_configuration_error_is_not_repeated(tmp_path: Path) -> None:
    completed = subprocess.run(
        [*_launch(), "--num_workers", "1", "--max_restarts", "3", "--", "--config", "missing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2
    assert completed.stderr.count("[0] error: ") == 1
    said = last_words(completed.stderr).splitlines()
    assert said[0] == "No restart: exit code 2 means an error in flags, configuration or data: correct it."
    assert said[1] == "The job failed: worker 0 failed with exit code 2. It was the first to fail."
    assert said[2] == "The last line of worker 0:"


@pytest.mark.extended
def test_a_request_to_stop_ends_the_pause_between_restarts(tmp_path: Path) -> None:
    script = 'open("starts", "a").write("x")\nsign("started"); sys.exit(5)'
    with started(tmp_path, script, "--max_restarts", "99", num_workers=1) as launcher:
        wait_until(lambda: (tmp_path / "starts").exists() and len((tmp_path / "starts").read_text()) == 4, "4 starts")
        time.sleep(1)
        began_seconds = time.monotonic()  # in a pause of 4 s
        launcher.send(signal.SIGTERM)
        code, _, err = launcher.finish()
    assert code == 143
    assert time.monotonic() - began_seconds < 2
    assert last_words(err).splitlines()[-1] == "Stopped by SIGTERM. Worker 0 failed with exit code 5."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_request_to_stop_is_passed_on_once_and_never_restarts(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, SAVES, "--max_restarts", "3") as launcher:
        launcher.wait_for("ready-0", "ready-1")
        launcher.send(number)
        launcher.wait_for("saved-0", "saved-1")
        launcher.send(number)  # `timeout` and others send it twice
        code, out, err = launcher.finish()
    assert code == 128 + number
    assert out.count("works") == 2, "none was started again"
    assert last_words(err).splitlines() == [
        f"{number.name}: the workers are asked to stop, and killed after 30 s. Ctrl-C again kills them at once.",
        f"Stopped by {number.name}. All workers exited normally.",
    ]
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").read_text() == "SIGTERM\n"


def test_who_is_not_done_after_the_grace_is_killed(tmp_path: Path) -> None:
    with started(
        tmp_path, "if rank == 1:\n    signal.pause()\n" + DEAF + "time.sleep(60)", "--grace_seconds", "0.2"
    ) as (launcher):
        launcher.wait_for("ready-0")
        launcher.send(signal.SIGTERM)
        code, _, err = launcher.finish()
    assert code == 143
    assert "Stopped by SIGTERM. Worker 0 was killed by SIGKILL. Worker 1 was killed by SIGTERM." in last_words(err)


def test_after_a_preemption_all_workers_save_without_another_signal(tmp_path: Path) -> None:
    script = (
        """
if rank == 0:
    sign("ready")
    signal.signal(signal.SIGTERM, lambda number, frame: sign("disturbed"))
    wait("saved-1")
    time.sleep(0.5)  # ends later than the one that was asked
    sign("saved")
    sys.exit(130)
"""
        + SAVES
        + "# "
    )
    with started(tmp_path, script.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGTERM)")) as launcher:
        code, _, err = launcher.finish()
    assert code == 130
    assert (tmp_path / "saved-0").exists()
    assert not (tmp_path / "disturbed-0").exists()
    assert "a worker was asked to stop, and all workers stopped with a checkpoint (exit code 130)" in last_words(err)


def test_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with started(tmp_path, DEAF + "time.sleep(60)") as launcher:
        launcher.wait_for("ready-0", "ready-1")
        launcher.send(signal.SIGKILL)
        launcher.process.wait()
        numbers = [int((tmp_path / f"ready-{rank}").read_text()) for rank in range(2)]
        wait_until(lambda: not any(map(is_alive, numbers)), "all are gone")


def test_processes_of_a_worker_end_with_it(tmp_path: Path) -> None:
    # The child holds the worker's output open: the launcher must not wait for it either.
    code, _, err = run(tmp_path, 'sign("child", str(subprocess.Popen(["sleep", "60"]).pid))')
    assert code == 0, err
    assert not any(is_alive(int((tmp_path / f"child-{rank}").read_text())) for rank in range(2))


def test_a_reader_that_goes_away_stops_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, SAVES) as launcher:
        assert launcher.process.stdout is not None
        assert b"works" in launcher.process.stdout.readline()
        launcher.wait_for("ready-0", "ready-1")
        launcher.process.stdout.close()  # though no worker writes again
        launcher.process.stdout = None
        code, _, err = launcher.finish()
    assert code == 128 + signal.SIGPIPE
    assert "Stopped by SIGPIPE. All workers exited normally." in last_words(err)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


def test_on_a_terminal_the_chief_draws_and_the_others_keep_to_their_lines(tmp_path: Path) -> None:
    script = """
if rank == 0:
    sys.stdout.write("\\r50%")
    sys.stdout.flush()
    sign("half")
    wait("sent-1")
    print("\\r100%", sys.stdout.isatty())
else:
    wait("half-0")
    print("no bar", sys.stdout.isatty())
    sign("sent")
"""
    ours, theirs = pty.openpty()
    try:
        with started(tmp_path, script, out=theirs) as launcher:
            code, _, err = launcher.finish()
        written = os.read(ours, 10000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert code == 0, err
    assert "\r100% True\r\n" in written
    assert "\r\x1b[K[1] no bar False\r\n" in written
    assert "[0]" not in written


def test_a_bad_flag_is_one_sentence(tmp_path: Path) -> None:
    completed = subprocess.run(
        [*_launch(), "--config", "x.toml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr == (
        "error: --config is no flag. The command of the workers follows after --, as in python -m tfpar.launch "
        "--num_workers 2 -- --config digits_workers. See python -m tfpar.launch --help.\n"
    )


def _launch() -> list[str]:
    return [sys.executable, "-m", "tfpar.launch"]

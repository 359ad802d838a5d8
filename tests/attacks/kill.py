"""Kill a job at random: any worker or the launcher, at any moment; its results do not change.

A killed launcher is started again with the same command, as its user would do. After the kills the weights and metrics
must be those of an undisturbed job, bit for bit, and no process may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support import command, faults, leaks

NUM_WORKERS = 2
SECONDS_OF_A_START = 12.0  # on two idle cores 6
SECONDS_TO_END = 20.0  # for what a killed launcher leaves
MOST_SECONDS = 600.0  # from one kill to the next, or to the end
WORDS = [
    *faults.launch(NUM_WORKERS, "--max_restarts", "1000"),
    *(*faults.FLAGS, *faults.DROPOUT, *faults.OF_A_JOB),
]


def main(arguments: Sequence[str]) -> int:
    """Kill as often as `--kills` says, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks kill")
    parser.add_argument("--kills", type=int, default=20, help="how many processes to kill")
    parser.add_argument("--epochs", type=int, default=30, help="the length of each job, of 64 steps an epoch")
    parser.add_argument("--seed", type=int, default=0, help="the same seed chooses the same victims and delays")
    asked = parser.parse_args(arguments)
    findings = attack(asked.kills, asked.epochs, asked.seed)
    for finding in findings:
        print(f"FINDING: {finding}")
    print(f"{asked.kills} kills, {len(findings)} findings")
    return 1 if findings else 0


def attack(kills: int, epochs: int, seed: int) -> list[str]:
    """Kill processes of one job after another; return the findings."""
    rng, findings, done, number = random.Random(seed), [], 0, 0
    words = [*WORDS, *command.settings(f"training.epochs={epochs}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = faults.prepare(folder / "undisturbed")
        findings += Job(words, undisturbed).run(rng, kills=0)
        while done < kills and not findings:
            number += 1
            job = Job(words, faults.prepare(folder / f"job-{number}"), longest_delay_seconds=min(2.0, 0.1 * epochs))
            findings += [f"job {number}: {finding}" for finding in job.run(rng, kills - done)]
            findings += [f"job {number}: {finding}" for finding in differences(job.folder, undisturbed)]
            done += len(job.killed)
            print(f"job {number}: killed {', '.join(job.killed) or 'nothing'}", flush=True)
            if number > 3 * kills + 3:
                findings.append("jobs end before they can be killed: ask for more epochs")
    return findings


def differences(folder: Path, expected: Path) -> list[str]:
    """Say in which way the results of two jobs are not the same, bit for bit."""
    found = []
    try:
        command.assert_same_weights(folder / "run", expected / "run")
        if command.metrics(folder / "run") != command.metrics(expected / "run"):
            found.append("the metrics are not those of the undisturbed job")
    except (AssertionError, OSError) as error:
        found.append(f"the model is not that of the undisturbed job: {str(error)[:300]}")
    half = [path.name for path in folder.rglob("*") if "unfinished" in path.name]
    return [*found, *(f"{name} is left" for name in half)]


class Job:
    """A job that is started until it ends without an error.

    Args:
        words: The command's.
        folder: Where it runs.
        longest_delay_seconds: The most time between a checkpoint and the kill that follows.
    """

    def __init__(self, words: Sequence[str], folder: Path, longest_delay_seconds: float = 0.0) -> None:
        self.folder, self._words, self._longest_delay_seconds = folder, words, longest_delay_seconds
        self.killed: list[str] = []

    def run(self, rng: random.Random, kills: int) -> list[str]:
        """Start the job, kill at most so many of its processes, and start it again where the launcher was killed."""
        while True:
            mark = uuid.uuid4().hex
            with faults.started(self._words, self.folder, {leaks.MARK: mark}) as process:
                code = self._disturb(process, mark, rng, kills)
                left = _wait_for_none(mark)
                err = process.written()[1]
            findings = [f"process {one.pid} ({one.command[:80]}) is left" for one in left]
            findings += ["a traceback was printed"] * ("Traceback" in err)
            launcher_was_killed = bool(self.killed) and self.killed[-1] == "launcher" and code == -signal.SIGKILL
            if code != 0 and not launcher_was_killed:
                findings.append(f"exit code {code}: {err[-500:]}")
            if findings or code == 0:
                return findings

    def _disturb(self, process: faults.Process, mark: str, rng: random.Random, kills: int) -> int | None:
        """Kill until the launcher has ended or enough is killed; return its exit code."""
        while True:
            deadline_seconds = time.monotonic() + MOST_SECONDS
            if len(self.killed) < kills:
                deadline_seconds = min(deadline_seconds, time.monotonic() + self._delay(process, rng))
            while (code := process.code()) is None and time.monotonic() < deadline_seconds:
                time.sleep(0.01)
            if code is not None or len(self.killed) >= kills:
                return code
            victims = _victims(mark, process.pid)
            name = rng.choice(sorted(victims)) if victims else "launcher"
            self.killed.append(name)
            with suppress(ProcessLookupError):
                os.kill(victims.get(name, process.pid), signal.SIGKILL)

    def _delay(self, process: faults.Process, rng: random.Random) -> float:
        """Return seconds until the next kill: within the start, or after the next checkpoint, while others follow."""
        if rng.random() < 0.4:
            return rng.uniform(0, SECONDS_OF_A_START)
        delay, before = rng.uniform(0, self._longest_delay_seconds), self._checkpoints()
        deadline_seconds = time.monotonic() + MOST_SECONDS
        while process.code() is None and self._checkpoints() <= before and time.monotonic() < deadline_seconds:
            time.sleep(0.01)
        return delay

    def _checkpoints(self) -> int:
        steps = [path.stem.removeprefix("step-") for path in self.folder.glob("run/checkpoints/step-*.npz")]
        return max(map(int, steps), default=0)


def _victims(mark: str, launcher: int) -> dict[str, int]:
    found = {"launcher": launcher}
    for one in leaks.processes(mark):
        if not one.is_marked or one.state == "Z" or one.pid == launcher:
            continue
        with suppress(OSError):
            environment = Path(f"/proc/{one.pid}/environ").read_bytes()
            ranks = [rank for rank in range(NUM_WORKERS) if f'"index": {rank}}}'.encode() in environment]
            found |= {f"worker {rank}": one.pid for rank in ranks}
    return found


def _wait_for_none(mark: str) -> list[leaks.Process]:
    """Return the processes of a job that are still there some time after its end."""
    deadline_seconds = time.monotonic() + SECONDS_TO_END
    while (left := [one for one in leaks.processes(mark) if one.is_marked and one.state != "Z"]) and (
        time.monotonic() < deadline_seconds
    ):
        time.sleep(0.05)
    for one in left:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    return left

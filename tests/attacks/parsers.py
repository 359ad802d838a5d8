"""Malformed inputs to every parser: each gives a value or one sentence per problem, soon and in little memory.

`python -m tests.attacks parsers --inputs 10000` draws other inputs at each run; `--seed` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import flagsaver
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as fixed_seed
from hypothesis import strategies as st

from tests.attacks import malformed
from tests.support import stand_ins
from tfpar import config, launch, train
from tfpar.cluster import job_secret, slurm, tf_config
from tfpar.cluster.gpu import gpus
from tfpar.cluster.rendezvous import messages
from tfpar.commands import command_line
from tfpar.files import json_lines
from tfpar.launcher import manifests
from tfpar.launcher.worker import Lines
from tfpar.messages import received, suggestions

MAX_SECONDS = 1.0  # of the processor
MAX_LINES = received.MAX_PROBLEMS + 1
MEMORY_BYTES = 1 << 30  # beyond what the process has when it begins


class Parser(NamedTuple):
    """Something that reads what users, other programs or the network write.

    Args:
        inputs: What it is given.
        read: Calls it; whatever it returns must be right for the input, or an assertion fails.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]


def read_config(content: bytes) -> None:
    """Load a configuration, which then can be written and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_bytes(content)
        run = config.load(path)
        path.write_text(config.dump(run), encoding="utf-8")
        assert repr(config.load(path)) == repr(run)  # as NaN is not equal to itself


def read_overrides(overrides: list[str]) -> None:
    """Load the default run with overrides."""
    run = config.load(None, overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(config.dump(run), encoding="utf-8")
        assert repr(config.load(path)) == repr(run)


def read_job(environment: dict[str, str]) -> None:
    """Find a process's place in its job."""
    job = tf_config.from_environment(environment)
    if job is not None:
        assert 0 <= job.rank < max(1, job.num_workers)
        assert len(set(job.addresses)) == job.num_workers
        assert all(1 <= tf_config.split_address(address)[1] <= 65535 for address in job.addresses)


def read_train_command(words: list[str]) -> None:
    """Run the train command as far as it goes without TensorFlow."""
    _run(lambda given: command_line.parse(train.COMMAND, given), train.main, [*words, "--print_config"])


def read_launch_command(words: list[str]) -> None:
    """Run the launch command, printing what it would start."""
    _run(launch._parse, launch.main, ["--num_workers=2", "--print=slurm", *words])


def _run(parse: Callable[[list[str]], list[str]], main: Callable[[list[str]], int], words: list[str]) -> None:
    """Call a command; what it refuses is raised as an error with its sentence."""
    out, error = io.StringIO(), io.StringIO()
    with (
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        mock.patch.object(launch, "launch", return_value=0),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("TF_CONFIG", None)
        try:
            code = main(parse(["command", *words]))
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert code in (0, 1), code
    assert out.getvalue() or code, "it did something"
    if code:
        lines = error.getvalue().splitlines()
        assert all(line.startswith("error: ") for line in lines), lines
        raise ValueError("\n".join(line.removeprefix("error: ") for line in lines))


def read_script(words: list[str]) -> None:
    """Print a batch script whose shell gets the very words."""
    script = manifests.slurm_script(2, ["python", *words], 1)
    start = script.index("--label \\\n") + len("--label \\\n")
    assert shlex.split(script[start : script.index("\ncode=$?")]) == ["python", *words]


def read_lines(chunks: list[bytes]) -> None:
    """Cut a stream into lines, of which nothing is lost and little is held back."""
    lines = Lines()
    found = [line for chunk in chunks if chunk for line in lines.feed(chunk)]
    found += lines.rest()
    assert b"".join(found) == b"".join(chunks).replace(b"\r", b"").replace(b"\n", b"")
    assert max(map(len, found), default=0) <= (1 << 16) + max(map(len, chunks), default=0)


def read_metrics(content: bytes) -> None:
    """Read the metrics of a run: entries and damaged lines, which together are all lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(content)
        entries, damaged = json_lines.read(path)
        assert all(isinstance(entry["epoch"], int) for entry in entries)
        assert len(entries) + len(damaged) == len(content.removesuffix(b"\n").split(b"\n")) * bool(content)


def read_greetings(line: bytes) -> None:
    """Read what a stranger sends to a worker, or to the chief of a job without a secret."""
    challenge = messages.read_greeting(line)
    assert challenge is None or len(challenge) == 32
    assert messages.read_hello(line, "0" * 32, JOB.num_workers, b"") is None, "it has no proof"


def read_answer(text: str) -> None:
    """Read what an impostor of the chief answers in a job without a secret, where anybody can write the proof."""
    challenges = messages.Challenges("0" * 32, "1" * 32)
    proof = job_secret.proof(b"", "chief", *challenges, text)
    line = f"{proof} {text}\n".encode("utf-8", "surrogatepass")
    found = messages.read_answer(line, challenges, JOB, b"")
    assert found is None or set(found.missing) <= set(JOB.addresses), "what is printed is the job's own"
    assert found is None or found.difference is None or "\x1b" not in "".join(found.difference[1:])
    assert messages.read_answer(text.encode("utf-8", "surrogatepass"), challenges, JOB, b"") is None


JOB = tf_config.JobConfig(("a:1", "b:1", "c:1"), rank=1, role="worker")
METRICS = '{"epoch": 1, "step": 10, "loss": 0.5}\n{"epoch": 2, "step": 20, "loss": NaN}\n'
GREETINGS = [f"tfpar {'0' * 32}\n", f"1 {'0' * 32} {'0' * 64}\n"]
PARSERS = {
    "configuration": Parser(malformed.toml_files(), read_config),
    "overrides": Parser(malformed.overrides(), read_overrides),
    "TF_CONFIG": Parser(malformed.tf_configs(), lambda text: read_job({"TF_CONFIG": text})),
    "Slurm": Parser(malformed.slurm_variables(), read_job),
    "hosts": Parser(malformed.mutated(["node[01-03,7],gpu1", "a[1-2][1-2]"]), slurm.expand_hosts),
    "tasks": Parser(malformed.mutated(["2(x3),1"]), slurm.expand_tasks),
    "CUDA_VISIBLE_DEVICES": Parser(
        malformed.mutated([f"0,1,{stand_ins.uuid(0)}", "MIG-GPU-8f3c/1/0,-1"]),
        lambda text: gpus.named_in({"CUDA_VISIBLE_DEVICES": text}),
    ),
    "nvidia-smi": Parser(malformed.mutated([stand_ins.table(2)]), gpus.parse),
    "train flags": Parser(malformed.command_lines(tuple(train.COMMAND.flags)), read_train_command),
    "launch flags": Parser(malformed.command_lines(tuple(launch.COMMAND.flags)), read_launch_command),
    "batch scripts": Parser(st.lists(st.text(st.characters(codec="utf-8"), min_size=1)), read_script),
    "worker output": Parser(
        st.lists(st.binary() | st.sampled_from([b"\r", b"\n", b"\r\n", b"x" * 70_000])), read_lines
    ),
    "metrics": Parser(malformed.mutated([METRICS]).map(malformed.encoded), read_metrics),
    "greetings": Parser(malformed.mutated(GREETINGS).map(malformed.encoded) | st.binary(), read_greetings),
    "answers": Parser(
        malformed.mutated(['[["b:1"], null]', "[[], null]", '[[], [1, "Hybrid", "MultiWorker"]]']), read_answer
    ),
    "misspellings": Parser(
        malformed.mutated(["learning_rate"]), lambda word: suggestions.closest(word, ["epochs", "x"])
    ),
}


def check(parser: Parser, given_input: object) -> None:
    """Give a parser one input.

    Args:
        parser: The parser.
        given_input: The input.

    Raises:
        AssertionError: If it is answered in another way than with a value or a sentence, or too late.
    """
    began = time.process_time()
    try:
        parser.read(given_input)
    except (ValueError, OSError) as error:
        _check_sentences(str(error))
    seconds = time.process_time() - began
    assert seconds < MAX_SECONDS, f"it took {seconds:.1f} s"


def _check_sentences(message: str) -> None:
    lines = message.split("\n")
    assert len(lines) <= MAX_LINES, f"{len(lines)} problems"
    for line in lines:
        assert len(line) <= received.MAX_SENTENCE, f"{len(line)} characters: {line}"
        assert line.isprintable(), line
        assert line.endswith((".", "?")), line
        assert not any(words in line for words in ("set_int_max_str_digits", "recursion", "codec can't")), line


def attack(name: str, num_inputs: int, seed: int) -> None:
    """Give a parser many inputs.

    Args:
        name: Of the parser.
        num_inputs: How many.
        seed: Which; the same ones for the same seed.

    Raises:
        AssertionError: At the first input that is not answered well, reduced to a small one.
    """
    parser = PARSERS[name]

    @fixed_seed(seed)
    @settings(
        max_examples=num_inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(parser.inputs)
    def answers(given_input: object) -> None:
        check(parser, given_input)

    answers()


def main(arguments: Sequence[str]) -> int:
    """Attack every parser and print what was found.

    Args:
        arguments: `--inputs`, over all parsers together, and `--seed`.

    Returns:
        0 if nothing was found.
    """
    flags = argparse.ArgumentParser(prog="python -m tests.attacks parsers", description=__doc__)
    flags.add_argument("--inputs", type=int, default=10_000)
    flags.add_argument("--seed", type=int, default=int(time.time()))
    flags.add_argument("--only", choices=sorted(PARSERS), nargs="*", default=list(PARSERS))
    given_flags = flags.parse_args(arguments)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    findings = 0
    for name in given_flags.only:
        began = time.monotonic()
        num_inputs = -(-given_flags.inputs // len(given_flags.only))
        try:
            attack(name, num_inputs, given_flags.seed)
        except Exception as error:  # whatever is raised is a finding
            findings += 1
            notes = "\n".join(getattr(error, "__notes__", ()))
            print(f"{name}: {type(error).__name__}: {error!s:.400}\n{notes:.1000}", flush=True)
        else:
            print(f"{name}: {num_inputs:,} inputs, {time.monotonic() - began:.0f} s, no finding", flush=True)
    print(f"{findings} finding(s), seed {given_flags.seed}", file=sys.stderr)
    return 1 if findings else 0

"""`python -m tfpar.launch`: start the workers of a job on this machine, or print a script or manifest for a cluster.

python -m tfpar.launch --num_workers 2 -- --config configs/digits.toml      arguments of tfpar.train
python -m tfpar.launch --num_workers 2 -- script.py --epochs 3              your own script
python -m tfpar.launch --num_workers 2 -- -m package.module                 your own module
python -m tfpar.launch --num_workers 4 --hosts a,b -- --config configs/digits.toml    on host a and on host b
python -m tfpar.launch --num_workers 4 --print slurm -- --config configs/digits.toml
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from tfpar.cluster import cores, slurm
from tfpar.cluster.gpu import gpus
from tfpar.commands import command_line
from tfpar.commands.number_flags import Integer, Number, check_within
from tfpar.config.sections import A_WEEK_SECONDS
from tfpar.launcher import Job, gpu_division, hosts, launch, manifests
from tfpar.messages import received
from tfpar.messages.received import MAX_SENTENCE, excerpt, quoted
from tfpar.messages.suggestions import closest

_NUM_WORKERS = flags.DEFINE(
    Integer(), "num_workers", None, "Number of workers, of all hosts together; worker 0 is the chief."
)
_MAX_RESTARTS = flags.DEFINE(
    Integer(), "max_restarts", 0, "Restarts after failures other than usage errors; by default none."
)
_CORES_PER_WORKER = flags.DEFINE(
    Integer(), "cores_per_worker", None, "Cores and threads of a worker; by default the cores of this machine, divided."
)
_GPUS_PER_WORKER = flags.DEFINE(
    Integer(),
    "gpus_per_worker",
    None,
    "GPUs of a worker; by default the GPUs of this machine, or of CUDA_VISIBLE_DEVICES, divided. 0: train on CPUs.",
)
_GRACE_SECONDS = flags.DEFINE(
    Number(), "grace_seconds", 30.0, "Seconds from the request to stop to SIGKILL; by default 30."
)
_HOSTS = flags.DEFINE_string(
    "hosts",
    None,
    "The hosts of the job, with commas; run the same command, with the same TFPAR_JOB_SECRET, on each of them. By "
    "default all workers are on this one.",
)
_HOST = flags.DEFINE(Integer(), "host", None, "Number of this host in --hosts, from 0; by default found by address.")
_PORT = flags.DEFINE(
    Integer(), "port", None, f"With --hosts, port of the first worker of each host; by default {hosts.FIRST_PORT}."
)
_PRINT = flags.DEFINE_string(
    "print",
    None,
    "Start nothing; print a batch script (slurm), or a Kubernetes manifest: jobset, trainjob (Kubeflow Trainer v2), or "
    "tfjob (Training Operator v1, legacy).",
)

MAX_LOCAL_WORKERS = 1024  # each is a process with ports, threads and some hundred megabytes
MAX_CORES = 8192  # of one machine, Linux' limit
MAX_GPUS = 256  # of one worker on a cluster
_AFTER_DASHES = (
    "The command of the workers follows after --, as in "
    "python -m tfpar.launch --num_workers 2 -- --config digits_workers."
)
COMMAND: command_line.Command = command_line.Command(
    name="tfpar.launch",
    usage=[
        "--num_workers N [FLAG ...] -- TRAIN_FLAGS ...",
        "--num_workers N [FLAG ...] -- SCRIPT.py ...",
        "--num_workers N [FLAG ...] -- -m MODULE ...",
    ],
    flags={
        "num_workers": "N",
        "max_restarts": "TIMES",
        "cores_per_worker": "CORES",
        "gpus_per_worker": "GPUS",
        "grace_seconds": "SECONDS",
        "hosts": "A,B,...",
        "host": "N",
        "port": "PORT",
        "print": "KIND",
    },
    examples=[
        "python -m tfpar.launch --num_workers 2 -- --config digits_workers",
        "python -m tfpar.launch --num_workers 2 --max_restarts 3 -- script.py --width 8",
        "python -m tfpar.launch --num_workers 4 --hosts 10.0.0.1,10.0.0.2 -- script.py",
        "python -m tfpar.launch --num_workers 4 --print slurm -- --config mnist",
    ],
    details=lambda: "The workers' command follows --; python -m tfpar.train --help lists its flags.",
    way_out=lambda flag: "" if closest(flag, COMMAND.flags) else f" {_AFTER_DASHES}",
)


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: The program's name, then the arguments of every worker.

    Returns:
        The exit code: 0 if all workers succeed, 1 on an error here, else that of the first worker to fail, or 128 + n
        if signal n stopped the job, such as 141 (SIGPIPE) if the reader of the output is gone.
    """
    try:
        num_workers, host_plan = _num_workers(), _host_plan()
        num_local = num_workers if host_plan is None else host_plan.num_local
        cores_per_worker, gpus_per_worker = _cores_per_worker(num_local), _gpus_per_worker()
        arguments = worker_arguments(argv[1:])
        if _PRINT.value is not None:
            check_within("num_workers", num_workers, 1, slurm.MAX_TASKS)
            command = ["python", *arguments]
            print(_submission(_PRINT.value, num_workers, command, cores_per_worker, gpus_per_worker or 0), end="")
            return 0
        _refuse_other_job()
        check_within("num_workers", num_local, 1, MAX_LOCAL_WORKERS)
        check_within("max_restarts", _MAX_RESTARTS.value, 0, math.inf)
        _check_grace_seconds()
        division = gpu_division.divide(gpus.find(os.environ), num_local, gpus_per_worker)
        command, restarts, seconds = [sys.executable, *arguments], _MAX_RESTARTS.value, _GRACE_SECONDS.value
        return launch(Job(command, num_local, cores_per_worker, restarts, seconds, division, host_plan))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def worker_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments with which Python runs a worker.

    Args:
        words: The words after `--`: flags of `tfpar.train`; or `-m` and a module, or a `.py` file, with arguments.

    Raises:
        ValueError: If they are none of these.

    Example:
        >>> worker_arguments(["--config", "configs/digits.toml"])
        ['-m', 'tfpar.train', '--config', 'configs/digits.toml']
    """
    first = words[0] if words else "--"
    if first == "-m" and len(words) > 1:
        return list(words)
    if first.endswith(".py") and not first.startswith("-"):
        if not os.path.isfile(first):
            here = received.path(os.getcwd())
            raise ValueError(f"{received.path(first)}: there is no such file in {here}. Give the path of the script.")
        return list(words)
    if first.startswith("--"):
        return ["-m", "tfpar.train", *words]
    raise ValueError(
        f"After -- comes a flag of tfpar.train such as --config, a script that ends in .py, or -m and a module, "
        f"received {quoted(' '.join(words))}."
    )


def _num_workers() -> int:
    if _NUM_WORKERS.value is None:
        raise ValueError("--num_workers is not set. Say how many workers to start, such as --num_workers 2.")
    check_within("num_workers", _NUM_WORKERS.value, 1, math.inf)
    return int(_NUM_WORKERS.value)


def _host_plan() -> hosts.HostPlan | None:
    if _HOSTS.value is None:
        if _HOST.value is not None or _PORT.value is not None:
            raise ValueError("--host and --port need --hosts, which is not set. Add --hosts, or leave them out.")
        return None
    if _PRINT.value is not None:
        raise ValueError("--hosts starts the workers of this host, and --print starts none. Leave one out.")
    port = hosts.FIRST_PORT if _PORT.value is None else _PORT.value
    return hosts.plan(_HOSTS.value, _HOST.value, _num_workers(), port)


def _cores_per_worker(num_local: int) -> int:
    if _CORES_PER_WORKER.value is None:
        return max(1, cores.num_allowed_cores() // num_local)
    check_within("cores_per_worker", _CORES_PER_WORKER.value, 1, MAX_CORES)
    return int(_CORES_PER_WORKER.value)


def _gpus_per_worker() -> int | None:
    if _GPUS_PER_WORKER.value is None:
        return None
    check_within("gpus_per_worker", _GPUS_PER_WORKER.value, 0, MAX_GPUS)
    return int(_GPUS_PER_WORKER.value)


def _submission(
    kind: str, num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int
) -> str:
    printers = {
        "slurm": manifests.slurm_script,
        "jobset": manifests.jobset_manifest,
        "trainjob": manifests.trainjob_manifest,
        "tfjob": manifests.tfjob_manifest,
    }
    if kind not in printers:
        raise ValueError(f"--print must be one of {', '.join(printers)}, received {quoted(kind)}.")
    return printers[kind](num_workers, command, cores_per_worker, gpus_per_worker)


def _check_grace_seconds() -> None:
    if not 0 <= _GRACE_SECONDS.value <= A_WEEK_SECONDS:
        raise ValueError(
            f"--grace_seconds must be from 0 to {A_WEEK_SECONDS} (a week), received {_GRACE_SECONDS.value:g}."
        )


def _refuse_other_job() -> None:
    if os.environ.get("TF_CONFIG"):
        raise ValueError(
            "TF_CONFIG must not be set: this process belongs to a job already, and tfpar.launch starts a new one. "
            "With TF_CONFIG, run python -m tfpar.train on every machine; else unset it, here or with --hosts."
        )


def _parse(arguments: Sequence[str]) -> list[str]:
    """Parse the flags before `--`; the words after it belong to the workers, whatever they look like."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    _, *others = command_line.parse(COMMAND, arguments[:end])
    if others:
        first = arguments.index(others[0])
        written = shlex.join(["python", "-m", COMMAND.name, *arguments[1:first], "--", *arguments[first:end]])
        rule = f"{quoted(others[0])} is no flag, and the command of the workers follows after --. Write "
        print(f"error: {rule}{excerpt(written, MAX_SENTENCE - len(rule) - 1)}.", file=sys.stderr)
        sys.exit(1)
    return [arguments[0], *arguments[end + 1 :]]


def run() -> None:
    """Entry point of the console script `tfpar-launch`."""
    command_line.run(main, _parse)


if __name__ == "__main__":
    run()

"""Addresses of a Slurm job step, from the variables that `srun` sets for each task; no TensorFlow, no scontrol.

TensorFlow's own `SlurmClusterResolver` (`python/distribute/cluster_resolver/slurm_cluster_resolver.py`, 2.21) fails on
nodes without GPUs: its `get_num_gpus` runs `nvidia-smi` and raises FileNotFoundError; told `gpus_per_node=0`, it steps
through `range(0, 0, 0)`, which raises ValueError. It also gives every job the same ports, from 8888 on, and sorts the
hosts by name, while Slurm numbers its tasks in the order of its list.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

# Ports are 20000 to 32735: below 32768, where Linux begins to hand out ports for outgoing connections.
FIRST_PORT = 20000
PORTS_A_STEP = 64  # more tasks than this on one node reach into the ports of another step
NUM_SLOTS = 199  # prime, so that the steps of near jobs spread
SLOTS_BETWEEN_STEPS = 23  # of one job: its first steps stay clear of the jobs submitted right after it

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^\s,\[\]]|{_RANGES})+"


def from_variables(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int] | None:
    """Return all addresses in rank order, and this task's rank; None outside a job step of several tasks.

    A batch script itself is no step: `sbatch` sets SLURM_NTASKS there too, but not SLURM_STEP_NUM_TASKS.

    Args:
        environment: The variables of this process, as `os.environ`.

    Raises:
        ValueError: If a variable is missing or not as Slurm writes it, or tasks do not fill one node after the other.

    Example:
        >>> from_variables({"SLURM_JOB_ID": "7"}) is None
        True
    """
    if "SLURM_STEP_ID" not in environment or _number(environment, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    hosts = expand_hosts(_variable(environment, "SLURM_STEP_NODELIST"))
    tasks = expand_tasks(_variable(environment, "SLURM_STEP_TASKS_PER_NODE"))
    places = [(node, local) for node, num_tasks in enumerate(tasks) for local in range(num_tasks)]
    if len(hosts) != len(tasks) or len(places) != _number(environment, "SLURM_STEP_NUM_TASKS"):
        raise ValueError(
            "SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NUM_TASKS must speak of the same tasks, "
            f"received {len(hosts)} node(s), tasks {tasks} and {environment['SLURM_STEP_NUM_TASKS']} task(s). "
            "Start the command with srun, and keep its variables as they are."
        )
    rank = _number(environment, "SLURM_PROCID")
    _check_place(environment, places, rank)
    port = first_port(_number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID"))
    return tuple(f"{hosts[node]}:{port + local}" for node, local in places), rank


def first_port(job_id: int, step_id: int) -> int:
    """Return the port of a step's first task on each node; the others there have those that follow.

    All tasks must know all ports without talking, and two jobs on one node must not meet: the numbers of jobs and
    steps decide. The first steps of two jobs share ports only if the jobs' numbers differ by a multiple of 199.

    Args:
        job_id: SLURM_JOB_ID.
        step_id: SLURM_STEP_ID.

    Example:
        >>> first_port(4, 0), first_port(5, 0), first_port(4, 1)
        (20256, 20320, 21728)
    """
    return FIRST_PORT + PORTS_A_STEP * ((job_id + SLOTS_BETWEEN_STEPS * step_id) % NUM_SLOTS)


def expand_hosts(hostlist: str) -> list[str]:
    """Return the names in a list of hosts as Slurm shortens it, in its order.

    Args:
        hostlist: Names with ranges in brackets, zeros kept: `rack[1-2]node[01-03,7],gpu1`.

    Raises:
        ValueError: If it is no such list.

    Example:
        >>> expand_hosts("node[08-10,7],gpu1")
        ['node08', 'node09', 'node10', 'node7', 'gpu1']
    """
    if not re.fullmatch(rf"{_HOST}(?:,{_HOST})*", hostlist):
        raise ValueError(
            f"A list of hosts must be as Slurm writes it, such as node[01-03,7],gpu1, received {hostlist!r}. "
            "Start the command with srun, and keep its variables as they are."
        )
    return [name for host in re.findall(_HOST, hostlist) for name in _expand_host(host)]


def _expand_host(host: str) -> Iterator[str]:
    # Odd pieces stood in brackets: "rack[1-2]n[3]" is split into "rack", "1-2", "n", "3", "".
    pieces = re.split(r"\[(.*?)\]", host)
    choices = [_expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> list[str]:
    bounds = [part.partition("-") for part in ranges.split(",")]
    return [
        str(number).zfill(len(first))
        for first, _, last in bounds
        for number in range(int(first), int(last or first) + 1)
    ]


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Return how many tasks each node runs, in the order of the list of hosts.

    Args:
        tasks_per_node: Numbers, repeated ones as Slurm shortens them: `2(x3),1`.

    Raises:
        ValueError: If it is no such list.

    Example:
        >>> expand_tasks("2(x3),1")
        [2, 2, 2, 1]
    """
    if not re.fullmatch(r"\d+(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*", tasks_per_node):
        raise ValueError(
            f"Tasks per node must be as Slurm writes them, such as 2(x3),1, received {tasks_per_node!r}. "
            "Start the command with srun, and keep its variables as they are."
        )
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    return [int(count) for count, repeated in counts for _ in range(int(repeated or 1))]


def _check_place(environment: Mapping[str, str], places: Sequence[tuple[int, int]], rank: int) -> None:
    """Refuse `--distribution=cyclic` and the like: a task's rank would name the address of another."""
    actual = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_LOCALID")
    if rank >= len(places) or places[rank] != actual:
        raise ValueError(
            f"Tasks must fill one node after the other, received task {rank} as number {actual[1]} of node {actual[0]} "
            f"(SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID). Start them with srun --distribution=block."
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _variable(environment, name)
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"{name} must be a whole number, received {value!r}. Keep the variables that srun sets.")
    return int(value)


def _variable(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise ValueError(
            f"A task of a Slurm job step must have {name}, and it is not set. Keep the variables that srun sets (a "
            "container may need an option for it), or set TF_CONFIG, which comes first."
        )
    return environment[name]

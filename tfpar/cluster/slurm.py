"""Worker addresses of a Slurm job step, from the environment variables set by `srun`.

TensorFlow 2.21's `SlurmClusterResolver` (`python/distribute/cluster_resolver/slurm_cluster_resolver.py`) does not
suffice: it fails on nodes without GPUs (`get_num_gpus` runs `nvidia-smi`; `gpus_per_node=0` raises ValueError in
`range(0, 0, 0)`), uses the same ports from 8888 on for every job, and sorts the hosts by name, while Slurm numbers
tasks in the order of its host list.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from tfpar.messages.received import quoted

# Ports are 20000 to 32735, below the ephemeral ports of Linux, which start at 32768.
FIRST_PORT = 20000
PORTS_A_STEP = 64  # with more tasks on one node, ports overlap with those of another step
NUM_SLOTS = 199  # prime, so that steps of consecutive jobs get different ports
SLOTS_BETWEEN_STEPS = 23  # within a job, so that its steps do not overlap with the next jobs

# Slurm's own limit for one job (MAX_SLURM_NODES is 65,536); a longer list is a mistake or an attack.
MAX_TASKS = 65536
_MAX_TEXT = 1 << 20
_MAX_DIGITS = 10
_LAST_PORT = 65535
_LONGEST_NAME = 253  # of a host (RFC 1035)
_DIGITS = rf"[0-9]{{1,{_MAX_DIGITS}}}"
_RANGES = rf"\[{_DIGITS}(?:-{_DIGITS})?(?:,{_DIGITS}(?:-{_DIGITS})?)*\]"
_HOST = rf"(?:[^\s,\[\]]|{_RANGES})+"
_COUNT = rf"({_DIGITS})(?:\(x({_DIGITS})\))?"
_KEEP = "Start the command with srun, and keep its variables as they are."


def from_variables(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int] | None:
    """Return all addresses in rank order and the rank of this task; None outside a job step with several tasks.

    A batch script is not a step: `sbatch` sets SLURM_NTASKS, but not SLURM_STEP_NUM_TASKS.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If a variable is missing or invalid, or tasks do not fill the nodes one by one.

    Example:
        >>> from_variables({"SLURM_JOB_ID": "7"}) is None
        True
    """
    if "SLURM_STEP_ID" not in environment or number(environment, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    hosts = expand_hosts(variable(environment, "SLURM_STEP_NODELIST"))
    tasks = expand_tasks(variable(environment, "SLURM_STEP_TASKS_PER_NODE"))
    num_tasks = number(environment, "SLURM_STEP_NUM_TASKS")
    if len(hosts) != len(tasks) or sum(tasks) != num_tasks:
        raise ValueError(
            "SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NUM_TASKS must describe the same tasks, "
            f"received {len(hosts)} node(s), tasks {quoted(tasks)} and {num_tasks} task(s). {_KEEP}"
        )
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    rank = number(environment, "SLURM_PROCID")
    _check_block_distribution(environment, places, rank)
    port = first_port(number(environment, "SLURM_JOB_ID"), number(environment, "SLURM_STEP_ID"))
    if port + max(tasks) - 1 > _LAST_PORT:
        raise ValueError(
            f"Each task on a node needs its own port from {port} to {_LAST_PORT}, received {max(tasks)} tasks on "
            "one node. Start fewer."
        )
    return tuple(f"{hosts[node]}:{port + local}" for node, local in places), rank


def first_port(job_id: int, step_id: int) -> int:
    """Return the port of the first task on each node; the node's other tasks use the following ports.

    Each task computes all ports without communication. Jobs that share a node need different ports: the first steps of
    two jobs share ports only if their job ids differ by a multiple of 199.

    Args:
        job_id: SLURM_JOB_ID.
        step_id: SLURM_STEP_ID.

    Example:
        >>> first_port(4, 0), first_port(5, 0), first_port(4, 1)
        (20256, 20320, 21728)
    """
    return FIRST_PORT + PORTS_A_STEP * ((job_id + SLOTS_BETWEEN_STEPS * step_id) % NUM_SLOTS)


def expand_hosts(hostlist: str) -> list[str]:
    """Expand a Slurm host list, in order.

    Args:
        hostlist: Host names with ranges in brackets, such as `rack[1-2]node[01-03,7],gpu1`. Leading zeros are kept.

    Raises:
        ValueError: If the list is invalid, repeats a host, or names more hosts than a job can have.

    Example:
        >>> expand_hosts("node[08-10,7],gpu1")
        ['node08', 'node09', 'node10', 'node7', 'gpu1']
    """
    is_list = len(hostlist) <= _MAX_TEXT and re.fullmatch(rf"{_HOST}(?:,{_HOST})*", hostlist)
    hosts = re.findall(_HOST, hostlist) if is_list else []
    if not hosts or max(map(_longest_name, hosts)) > _LONGEST_NAME:
        raise ValueError(
            f"A list of hosts must be as Slurm writes it, such as node[01-03,7],gpu1, received {quoted(hostlist)}. "
            f"{_KEEP}"
        )
    # Counted before expansion: a short range can name a billion hosts.
    num_hosts = sum(_num_names(host) for host in hosts)
    if num_hosts > MAX_TASKS:
        raise ValueError(
            f"A list of hosts must name at most {MAX_TASKS} of them, received {quoted(hostlist)}, which names more. "
            f"{_KEEP}"
        )
    names = [name for host in hosts for name in _expand_host(host)]
    if len(set(names)) < len(names):
        twice = next(name for name, count in collections.Counter(names).items() if count > 1)
        raise ValueError(
            f"A list of hosts must name each host once, received {quoted(hostlist)}, with {quoted(twice)} twice. "
            f"{_KEEP}"
        )
    return names


def _longest_name(host: str) -> int:
    """Return an upper bound on the length of the expanded names."""
    widths = [max(map(len, re.split("[,-]", ranges))) for ranges in re.findall(r"\[(.*?)\]", host)]
    return len(re.sub(r"\[.*?\]", "", host)) + sum(widths)


def _num_names(host: str) -> int:
    """Return the number of expanded names, or any number above the limit."""
    number = 1
    for ranges in re.findall(r"\[(.*?)\]", host):
        number *= sum(last - first + 1 for first, last in _bounds(ranges))
        if number > MAX_TASKS:
            break
    return number


def _expand_host(host: str) -> Iterator[str]:
    # Odd parts were in brackets: "rack[1-2]n[3]" is split into "rack", "1-2", "n", "3", "".
    parts = re.split(r"\[(.*?)\]", host)
    choices = [_expand_ranges(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str) -> list[str]:
    widths = [len(part.partition("-")[0]) for part in ranges.split(",")]
    return [
        str(number).zfill(width)
        for width, (first, last) in zip(widths, _bounds(ranges), strict=True)
        for number in range(first, last + 1)
    ]


def _bounds(ranges: str) -> Iterator[tuple[int, int]]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(
                f"A range of hosts must go upwards, as in node[01-03], received {quoted(part)} in brackets. {_KEEP}"
            )
        yield int(first), int(last or first)


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Expand a Slurm list of tasks per node, in the order of the host list.

    Args:
        tasks_per_node: Task counts in Slurm's notation, such as `2(x3),1`.

    Raises:
        ValueError: If the list is invalid.

    Example:
        >>> expand_tasks("2(x3),1")
        [2, 2, 2, 1]
    """
    if len(tasks_per_node) > _MAX_TEXT or not re.fullmatch(rf"{_COUNT}(?:,{_COUNT})*", tasks_per_node):
        raise ValueError(
            f"Tasks per node must be as Slurm writes them, such as 2(x3),1, received {quoted(tasks_per_node)}. {_KEEP}"
        )
    counts = [(int(count), int(repeated or 1)) for count, repeated in re.findall(_COUNT, tasks_per_node)]
    if sum(repeated for _, repeated in counts) > MAX_TASKS or sum(count * times for count, times in counts) > MAX_TASKS:
        raise ValueError(
            f"Tasks per node must be at most {MAX_TASKS} together, received {quoted(tasks_per_node)}. {_KEEP}"
        )
    if not all(count and repeated for count, repeated in counts):
        raise ValueError(f"Each node must have at least one task, received {quoted(tasks_per_node)}. {_KEEP}")
    return [count for count, repeated in counts for _ in range(repeated)]


def _check_block_distribution(environment: Mapping[str, str], places: Sequence[tuple[int, int]], rank: int) -> None:
    """Refuse distributions such as `cyclic`, with which a task would get the address of another one."""
    actual = number(environment, "SLURM_NODEID"), number(environment, "SLURM_LOCALID")
    if rank >= len(places) or places[rank] != actual:
        raise ValueError(
            f"Tasks must fill one node after the other, received task {rank} as number {actual[1]} of node {actual[0]} "
            f"(SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID). Start them with srun --distribution=block."
        )


def number(environment: Mapping[str, str], name: str) -> int:
    """Return the integer in a variable of a job step; raise ValueError if it is missing or invalid."""
    value = variable(environment, name)
    if not re.fullmatch(_DIGITS, value):
        raise ValueError(f"{name} must be a whole number, received {quoted(value)}. Keep the variables that srun sets.")
    return int(value)


def variable(environment: Mapping[str, str], name: str) -> str:
    """Return a variable of a job step; raise ValueError if it is missing."""
    if name not in environment:
        raise ValueError(
            f"A task of a Slurm job step must have {name}, and it is not set. Keep the variables that srun sets (a "
            "container may need an option for it), or set TF_CONFIG, which comes first."
        )
    return environment[name]

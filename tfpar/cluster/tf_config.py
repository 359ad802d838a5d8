"""The job of this process, read and validated from TF_CONFIG or the variables of a Slurm job step.

Ranks follow TensorFlow: the chief has rank 0, followed by the workers; in a cluster without a "chief", worker 0 is the
chief. An evaluator does not take part in training and need not be listed in the cluster.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import ipaddress
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tfpar.cluster import slurm
from tfpar.messages.received import MAX_PROBLEMS, excerpt, quoted

JOB_TYPES = ("chief", "worker", "evaluator")
_MAX_TEXT = 1 << 20
_LONGEST_HOST = 253  # RFC 1035
_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,9})")


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """The workers of a job, and the rank and role of this process.

    Attributes:
        addresses: `host:port` of each worker, in rank order.
        rank: The rank of this process; 0 for an evaluator.
        role: The role of this process.

    Example:
        >>> job = JobConfig(("node1:2222", "node2:2222"), rank=1, role="worker")
        >>> job.num_workers, job.is_chief
        (2, False)
    """

    addresses: tuple[str, ...]
    rank: int
    role: Literal["chief", "worker", "evaluator"]

    @property
    def num_workers(self) -> int:
        """The number of workers, at least 1."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints, logs and the model."""
        return self.role == "chief"

    @property
    def is_on_loopback(self) -> bool:
        """Whether all workers run on this machine: all addresses are loopback addresses."""
        return all(_is_loopback(split_address(address)[0]) for address in self.addresses)

    @property
    def peers(self) -> tuple[str, ...]:
        """The addresses of the other workers; all workers for an evaluator."""
        own = None if self.role == "evaluator" else self.rank
        return tuple(address for rank, address in enumerate(self.addresses) if rank != own)


def from_environment(environment: Mapping[str, str]) -> JobConfig | None:
    """Return the job described by TF_CONFIG, or by the Slurm job step; None if there is neither.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If the variables are invalid, with one line per mistake.

    Example:
        >>> from_environment({"TF_CONFIG": to_tf_config(["localhost:2222", "localhost:2223"], rank=1)}).rank
        1
    """
    if "TF_CONFIG" in environment:
        return parse(environment["TF_CONFIG"])
    step = slurm.from_variables(environment)
    if step is None:
        return None
    addresses, rank = step
    return JobConfig(addresses, rank, "worker" if rank else "chief")


def has_other_workers(environment: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a job with several workers.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If the variables are invalid, with one line per mistake.

    Example:
        >>> has_other_workers({"TF_CONFIG": to_tf_config(["localhost:2222", "localhost:2223"], rank=1)})
        True
    """
    job = from_environment(environment)
    return job is not None and job.num_workers > 1


def to_tf_config(addresses: Sequence[str], rank: int) -> str:
    """Return the TF_CONFIG of a worker; worker 0 is the chief.

    Args:
        addresses: `host:port` of each worker, in rank order.
        rank: The rank of the worker.

    Example:
        >>> print(to_tf_config(["localhost:2222", "localhost:2223"], rank=1))
        {"cluster": {"worker": ["localhost:2222", "localhost:2223"]}, "task": {"type": "worker", "index": 1}}
    """
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def parse(text: str) -> JobConfig:
    """Parse a TF_CONFIG.

    Args:
        text: The value of TF_CONFIG, in JSON.

    Raises:
        ValueError: If it is invalid, with one line per mistake.

    Example:
        >>> parse('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}')
        JobConfig(addresses=('a:1', 'b:1'), rank=1, role='worker')
    """
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError("more than a million characters")
        described = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"TF_CONFIG must be JSON, received {quoted(text)}: {error.msg} at line {error.lineno}, column "
            f"{error.colno}; correct it, or unset TF_CONFIG to train on one worker."
        ) from None
    except (RecursionError, ValueError):
        raise ValueError(
            f"TF_CONFIG must list the addresses of a job, received {quoted(text)}, which is too long, too deep or has "
            "an integer of thousands of digits; correct it, or unset TF_CONFIG to train on one worker."
        ) from None
    if not isinstance(described, dict):
        raise ValueError(
            f'TF_CONFIG must be an object with "cluster" and "task", received {excerpt(text)}; '
            "write it so, or unset TF_CONFIG to train on one worker."
        )
    # Stop after the first mistakes: there can be a million.
    all_mistakes = itertools.chain(_cluster_mistakes(described), _task_mistakes(described))
    mistakes = list(itertools.islice(all_mistakes, MAX_PROBLEMS + 1))
    if len(mistakes) > MAX_PROBLEMS:
        mistakes[MAX_PROBLEMS:] = ["There are more mistakes: correct these first."]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return _job(described["cluster"], described["task"])


def _job(cluster: dict[str, list[str]], task: dict[str, Any]) -> JobConfig:
    chiefs, workers = cluster.get("chief", []), cluster.get("worker", [])
    addresses = (*chiefs, *workers)
    if task["type"] == "evaluator":
        return JobConfig(addresses, 0, "evaluator")
    rank = task["index"] + (len(chiefs) if task["type"] == "worker" else 0)
    return JobConfig(addresses, rank, "worker" if rank else "chief")


def _cluster_mistakes(described: dict[str, Any]) -> Iterator[str]:
    cluster = described.get("cluster")
    if not isinstance(cluster, dict) or not cluster:
        received = "none" if "cluster" not in described else quoted(cluster)
        yield (
            f'TF_CONFIG must have a "cluster" that lists the addresses of all workers, received {received}; write '
            '"cluster": {"worker": ["host:port", ...]}, or unset TF_CONFIG to train on one worker.'
        )
        return
    for job_type, addresses in cluster.items():
        yield from _job_type_mistakes(job_type, addresses)
    if not {"chief", "worker"} & cluster.keys():
        yield (
            f'"cluster" must have a worker or a chief, received {excerpt(", ".join(cluster))} only; list those '
            'that train as "worker".'
        )
    listed = [address for addresses in cluster.values() if isinstance(addresses, list) for address in addresses]
    counts = collections.Counter(address for address in listed if isinstance(address, str))
    for address, count in counts.items():
        if count > 1:
            yield (
                f'"cluster" must name each address once, received {quoted(address)} {count} times; '
                "give each its own port."
            )


def _job_type_mistakes(job_type: str, addresses: object) -> Iterator[str]:
    if job_type not in JOB_TYPES:
        hint = "tfpar has no parameter servers, so leave it out" if job_type == "ps" else "rename it or leave it out"
        yield f'"cluster" may have {", ".join(JOB_TYPES)}, received {quoted(job_type)}; {hint}.'
        return
    if not isinstance(addresses, list) or not addresses:
        yield (
            f'"cluster" must give each job type a list of addresses, received {quoted(addresses)} for {job_type!r}; '
            f'write "{job_type}": ["host:port", ...], or leave {job_type!r} out.'
        )
        return
    if job_type != "worker" and len(addresses) > 1:
        yield (
            f'"cluster" must have at most one {job_type}, received {len(addresses)}: {quoted(addresses)}; list the '
            'others as "worker".'
        )
    for index, address in enumerate(addresses):
        yield from _address_mistakes(f"{job_type} {index}", address)


def _address_mistakes(who: str, address: object) -> Iterator[str]:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) and address.isprintable() else None
    if match is None or not _is_host(match["host"]):
        yield f'The address of {who} must be text as "host:port", received {quoted(address)}; write it as "node1:2222".'
    elif not 1 <= int(match["port"]) <= 65535:
        yield f"The port of {who} must be from 1 to 65535, received {quoted(address)}; choose another port."


def _is_host(host: str) -> bool:
    """Return whether a host is valid; one in brackets must be an IPv6 address."""
    if host.startswith("["):
        with contextlib.suppress(ValueError):
            return bool(ipaddress.IPv6Address(host.strip("[]")))
        return False
    return len(host) <= _LONGEST_HOST


def _task_mistakes(described: dict[str, Any]) -> Iterator[str]:
    task = described.get("task")
    if not isinstance(task, dict):
        received = "none" if "task" not in described else quoted(task)
        yield (
            f'TF_CONFIG must have a "task" that says which worker this is, received {received}; write '
            '"task": {"type": "worker", "index": 0}.'
        )
        return
    cluster = described.get("cluster")
    roles = cluster if isinstance(cluster, dict) else {}
    yield from _type_mistakes(task, roles)
    yield from _index_mistakes(task, roles)


def _type_mistakes(task: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    job_type = task.get("type")
    if job_type not in JOB_TYPES:
        received = "none" if "type" not in task else quoted(job_type)
        yield f'The "type" of "task" must be one of {", ".join(JOB_TYPES)}, received {received}; write one of these.'
    elif cluster and job_type != "evaluator" and job_type not in cluster:
        yield (
            f'The "type" of "task" must be in "cluster", received {job_type!r}, and there are: '
            f"{excerpt(', '.join(cluster))}; list the address of this process there."
        )


def _index_mistakes(task: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    index, job_type = task.get("index"), task.get("type")
    if not isinstance(index, int) or isinstance(index, bool):
        received = "none" if "index" not in task else quoted(index)
        yield f'The "index" of "task" must be a whole number, received {received}; write it without quotes, from 0.'
        return
    addresses = cluster.get(job_type) if job_type in JOB_TYPES else None
    if addresses is None and job_type == "evaluator":
        addresses = [""]  # one evaluator, which the cluster need not list
    if isinstance(addresses, list) and addresses and not 0 <= index < len(addresses):
        yield (
            f'The "index" of "task" must be from 0 to {len(addresses) - 1}, as "cluster" has {len(addresses)} '
            f"{job_type}(s), received {quoted(index)}; correct it, or list all addresses."
        )


def check_port_free(job: JobConfig) -> None:
    """Check that the port of this worker is free, right before TensorFlow starts.

    TensorFlow only reports "Could not start gRPC server". If the host is not this machine, the address may be
    forwarded to another port, and nothing is checked. An evaluator needs no port.

    Args:
        job: The job of this process.

    Raises:
        OSError: If the port is taken.

    Example:
        >>> check_port_free(JobConfig(("localhost:2222",), rank=0, role="chief"))
    """
    if job.role == "evaluator":
        return
    address = job.addresses[job.rank]
    host, port = split_address(address)
    if not _is_this_machine(host):
        return
    for family in (socket.AF_INET6, socket.AF_INET):
        # With SO_REUSEADDR, as TensorFlow does: connections of an ended job do not block the port.
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue
            raise OSError(
                f"The port of this worker must be free, and {address} (rank {job.rank}) is taken: "
                f"{os.strerror(error.errno or 0)}. End the process that listens there, or choose another port."
            ) from None


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; brackets around an IPv6 address are removed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: a socket can be bound only to a local address."""
    with contextlib.suppress(OSError, UnicodeError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            return True
    return False

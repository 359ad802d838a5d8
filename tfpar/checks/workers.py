"""The network between the workers of a job: versions, clocks, ports both ways, bandwidth; the chief asks the others."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from tfpar.checks import worker_service
from tfpar.checks.check import Check
from tfpar.cluster import job_secret, tf_config
from tfpar.launcher.reserved_ports import ReservedPorts

PROGRAM = "tfpar.checks.worker_program"  # tests replace it by one with faults
START_SECONDS = 30.0
_CLOCK_BOUND_SECONDS = 1.0
_NUM_BYTES = 32 << 20
_MOST_PAIRS = 30  # beyond, only the pairs of a ring
_SLOW_PART = 0.5  # of the median bandwidth
_ROUND_TRIPS = 5


def check_local(num_workers: int) -> Iterator[Check]:
    """Yield the checks between workers on this machine: this process is the chief, and starts the others.

    Args:
        num_workers: Number of workers, at least 2.
    """
    secret = os.environ.get(job_secret.VARIABLE) or job_secret.new()
    with ReservedPorts(num_workers) as ports:
        started = [_start(ports.addresses, rank, secret) for rank in range(1, num_workers)]
        try:
            yield from check(tf_config.Job(tuple(ports.addresses), 0, "chief"), secret.encode())
        finally:
            for process in started:
                process.kill()
                process.wait()


def _start(addresses: Sequence[str], rank: int, secret: str) -> subprocess.Popen[bytes]:
    variables = {"TF_CONFIG": tf_config.to_tf_config(addresses, rank), job_secret.VARIABLE: secret}
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def serve(job: tf_config.Job, secret: bytes, seconds: float) -> bool:
    """Answer the chief until it ends the examination.

    Args:
        job: The job and the rank of this process in it.
        secret: The job secret; empty without one.
        seconds: The time limit.

    Returns:
        Whether the chief has ended it within the time limit.
    """
    service = worker_service.Service(job, secret)
    try:
        return service.has_ended.wait(seconds)
    finally:
        service.close()


def check(job: tf_config.Job, secret: bytes) -> Iterator[Check]:
    """Yield the checks of a job, on its chief.

    Args:
        job: The job.
        secret: The job secret; empty without one.
    """
    service = worker_service.Service(job, secret)
    present: list[int] = []
    try:
        found = _facts(job, secret)
        missing = {rank: one for rank, one in found.items() if isinstance(one, str)}
        for rank, reason in missing.items():
            yield _unreachable(job, rank, reason)
        present = [rank for rank in found if rank not in missing]
        if len(present) < 2:
            return
        yield _versions(found, present)
        yield _clocks(job, secret, present)
        yield from _ports(job, secret, present)
        yield _bandwidth(job, secret, present)
    finally:
        for rank in present[1:]:
            with contextlib.suppress(OSError, ValueError):
                worker_service.ask(job.addresses[rank], secret, {"do": "end"})
        service.close()


def _unreachable(job: tf_config.Job, rank: int, reason: str) -> Check:
    way_out = (
        "Start the doctor there, too; open the port in the firewalls between the machines; check the address in "
        "TF_CONFIG."
    )
    figure = f"worker {rank} at {job.addresses[rank]} does not answer within {START_SECONDS:g} s: {reason}"
    return Check(f"worker {rank}", "WRONG", figure, "", way_out, {"address": job.addresses[rank]})


def _facts(job: tf_config.Job, secret: bytes) -> dict[int, dict[str, str] | str]:
    """Return the versions of each worker, or why it does not answer."""
    ends_seconds = time.monotonic() + START_SECONDS
    found: dict[int, dict[str, str] | str] = {}
    for rank, address in enumerate(job.addresses):
        while True:
            try:
                found[rank] = worker_service.ask(address, secret, {"do": "facts"}, seconds=20.0)
                break
            except (OSError, ValueError) as error:
                found[rank] = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if time.monotonic() > ends_seconds:
                    break
                time.sleep(0.2)
    return found


def _versions(found: Mapping[int, dict[str, str] | str], present: Sequence[int]) -> Check:
    rows = {rank: dict(one) for rank in present if not isinstance(one := found[rank], str)}
    chiefs = rows[present[0]]
    different = [
        f"worker {rank} has {name} {rows[rank].get(name)} instead of {chiefs[name]}"
        for rank in present
        for name in chiefs
        if rows[rank].get(name) != chiefs[name]
    ]
    values = {"versions": {str(rank): rows[rank] for rank in present}}
    if different:
        way_out = "Install the same versions everywhere: workers of different ones can differ without an error."
        return Check("versions of workers", "WRONG", "; ".join(different), "equal", way_out, values)
    return Check("versions of workers", "ok", f"{len(present)} workers have equal versions and code", values=values)


def _clocks(job: tf_config.Job, secret: bytes, present: Sequence[int]) -> Check:
    offsets = {rank: _offset(job.addresses[rank], secret) for rank in present[1:]}
    worst = max(offsets, key=lambda rank: abs(offsets[rank]))
    is_far = abs(offsets[worst]) > _CLOCK_BOUND_SECONDS
    figure = f"worker {worst} differs most from the chief, by {offsets[worst]:+.3f} s"
    way_out = "Let chronyd or ntpd set it: times in logs and checkpoints are compared between machines."
    bound = f"{_CLOCK_BOUND_SECONDS:g} s"
    values = {"offset_seconds": {str(rank): one for rank, one in offsets.items()}}
    return Check("clocks", "slow" if is_far else "ok", figure, bound, way_out if is_far else "", values)


def _offset(address: str, secret: bytes) -> float:
    """Return the clock of a worker less this one, from the quickest of some round trips."""
    found = []
    for _ in range(_ROUND_TRIPS):
        begin = time.time()
        theirs = float(worker_service.ask(address, secret, {"do": "clock"}))
        end = time.time()
        found.append((end - begin, theirs - (begin + end) / 2))
    return min(found)[1]


def _ports(job: tf_config.Job, secret: bytes, present: Sequence[int]) -> Iterator[Check]:
    ranks = {address: rank for rank, address in enumerate(job.addresses)}
    closed = []
    for rank in present:
        problems = worker_service.ask(job.addresses[rank], secret, {"do": "reach"})
        closed += [(rank, ranks[address], str(reason)) for address, reason in problems.items()]
    for source, target, reason in closed:
        if target not in present:
            continue  # named above: nobody reaches it
        way_out = f"Open port {tf_config.split_address(job.addresses[target])[1]} there for worker {source}."
        figure = f"worker {source} cannot connect to {job.addresses[target]}: {reason}"
        yield Check(f"port of worker {target}", "WRONG", figure, "", way_out)
    if not any(target in present for _, target, _ in closed):
        yield Check("ports", "ok", f"all {len(present) * (len(present) - 1)} ordered pairs of workers can connect")


def _bandwidth(job: tf_config.Job, secret: bytes, present: Sequence[int]) -> Check:
    pairs = [(a, b) for a in present for b in present if a != b]
    if len(pairs) > _MOST_PAIRS:
        pairs = list(zip(present, [*present[1:], present[0]], strict=True))
    found: dict[tuple[int, int], float] = {}
    for source, target in pairs:
        request = {"do": "send", "rank": target, "num_bytes": _NUM_BYTES}
        with contextlib.suppress(OSError, ValueError):
            seconds = float(worker_service.ask(job.addresses[source], secret, request))
            found[source, target] = _NUM_BYTES * 8e-9 / max(seconds, 1e-9)
    if len(found) < len(pairs):
        failed = next(pair for pair in pairs if pair not in found)
        figure = f"worker {failed[0]} cannot send {_NUM_BYTES >> 20} MiB to worker {failed[1]}"
        return Check("bandwidth", "WRONG", figure, "", "A firewall may cut connections, or an MTU be too large.")
    median, worst = statistics.median(found.values()), min(found, key=lambda pair: found[pair])
    is_slow = found[worst] < _SLOW_PART * median
    listed = f"median {median:.2f} Gbit/s, slowest {found[worst]:.2f} from worker {worst[0]} to worker {worst[1]}"
    way_out = f"Every all-reduce waits for it: look at the cable, the switch and the link of worker {worst[1]}."
    return Check(
        "bandwidth",
        "slow" if is_slow else "ok",
        listed,
        f"{_SLOW_PART:g} of the median",
        way_out if is_slow else "",
        {"gbit_per_second": {f"{a} to {b}": one for (a, b), one in found.items()}},
    )

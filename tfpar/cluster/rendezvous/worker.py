"""A worker's side of the rendezvous: it retries until the chief answers or time is up."""

from __future__ import annotations

import contextlib
import socket
import time

from tfpar.cluster import job_secret, reachability
from tfpar.cluster.rendezvous import messages
from tfpar.cluster.tf_config import JobConfig, split_address

_RETRY_SECONDS = 0.1
_GREETING_SECONDS = 5.0  # a chief sends its greeting at once
_ANSWER_SECONDS = 5.0  # the chief's answer may arrive this long after the worker's time limit


def report(
    job: JobConfig, seconds: float, secret: bytes, keep: messages.Keep | None = None, strategy: str = ""
) -> messages.Outcome:
    """Connect to the chief and wait for its answer.

    Args:
        job: The job of this process.
        seconds: Time limit.
        secret: The job secret.
        keep: Receives the connection to the chief, if all workers are present with the same strategy; None closes it.
        strategy: The name of this process's strategy.

    Returns:
        The chief's answer. Without one, the chief is the missing worker, with the reason why it was unreachable.

    Raises:
        ValueError: If the chief refuses this worker's secret.
    """
    ends_seconds = time.monotonic() + seconds
    remark, problem = "", None
    while (left := ends_seconds - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(split_address(job.addresses[0]), timeout=min(left, 5.0))
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            if problem is None or not isinstance(error, TimeoutError):  # the last attempt has little time
                problem = reachability.reason(error)
        else:
            problem = None
            with connection, contextlib.suppress(OSError):
                outcome, remark = _ask(connection, job, secret, ends_seconds, remark, strategy)
                if outcome is not None:
                    if keep is not None and not outcome.missing and outcome.difference is None:
                        keep(0, connection.dup())
                    return outcome
        time.sleep(_RETRY_SECONDS)
    chief = job.addresses[0]
    return messages.Outcome([chief], remark, {} if problem is None else {chief: problem})


def _ask(
    connection: socket.socket, job: JobConfig, secret: bytes, ends_seconds: float, remark: str, strategy: str
) -> tuple[messages.Outcome | None, str]:
    """Return the chief's answer or None, and the remark for the error."""
    greeting_ends = min(time.monotonic() + _GREETING_SECONDS, ends_seconds + _ANSWER_SECONDS)
    greeting = _read_line(connection, greeting_ends, messages.LONGEST_GREETING_BYTES)
    challenge = messages.read_greeting(greeting)
    if challenge is None:
        return None, " Another program answers at the chief's address." if greeting else remark
    challenges = messages.Challenges(challenge, messages.new_challenge())
    connection.sendall(messages.hello(job.rank, challenges, secret, strategy))
    line = _read_line(connection, ends_seconds + _ANSWER_SECONDS, messages.LONGEST_ANSWER_BYTES)
    if line == messages.REFUSED:
        raise ValueError(_refusal(job))
    outcome = messages.read_answer(line, challenges, job, secret)
    if outcome is None and line:
        remark = f" The program at the chief's address does not have this job's {job_secret.VARIABLE}."
    return outcome, remark


def _refusal(job: JobConfig) -> str:
    return (
        f"{job_secret.VARIABLE} must be the same for all workers, and the chief at {job.addresses[0]} refused "
        f"worker {job.rank}. Set one value and install one version of tfpar for all workers, and check that no "
        "other job uses this address."
    )


def _read_line(connection: socket.socket, ends_seconds: float, most_bytes: int) -> bytes:
    """Read a line; empty if the peer closes the connection, sends too much, or takes too long."""
    line = b""
    while not line.endswith(b"\n") and len(line) < most_bytes:
        left = ends_seconds - time.monotonic()
        if left <= 0:
            return b""
        connection.settimeout(left)
        data = connection.recv(4096)
        if not data:
            return b""
        line += data
    return line if line.endswith(b"\n") else b""

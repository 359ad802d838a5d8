"""The entry point of the rendezvous."""

from __future__ import annotations

import os
import sys

from tfpar.cluster import job_secret, reachability, tf_config
from tfpar.cluster.rendezvous import chief, worker
from tfpar.cluster.rendezvous.messages import Keep, Outcome

_MOST_ASKED, _ASK_SECONDS = 16, 2.0


def connect_workers(job: tf_config.JobConfig, seconds: float, keep: Keep | None = None, strategy: str = "") -> None:
    """Wait until all workers of a job are connected. Every worker must call it.

    Args:
        job: The job of this process.
        seconds: Time limit.
        keep: Receives the open connections, for heartbeats: on the chief those to all workers, on a worker the one to
            the chief. None closes them.
        strategy: The name of this process's strategy. Processes with different strategies would deadlock.

    Raises:
        TimeoutError: If workers are missing; raised on every worker, with their addresses.
        ValueError: If workers create different strategies, or TFPAR_JOB_SECRET is too short or refused by the chief.
        OSError: If the chief's port is taken.

    Example:
        >>> connect_workers(tf_config.JobConfig(("localhost:2222",), rank=0, role="chief"), seconds=300)
    """
    secret = job_secret.from_environment(os.environ)
    if job.num_workers == 1:
        return
    if not secret and job.rank == 0 and not job.is_on_loopback:
        print(
            f"warning: {job_secret.VARIABLE} is not set: any program that reaches {job.addresses[0]} can take a "
            "worker's place. Set the same random text on all workers.",
            file=sys.stderr,
        )
    tf_config.check_port_free(job)
    outcome = (chief.gather if job.rank == 0 else worker.report)(job, seconds, secret, keep, strategy)
    if outcome.difference is not None:
        rank, theirs, chiefs = outcome.difference
        raise ValueError(
            f"All workers must create the same strategy, and worker {rank} ({job.addresses[rank]}) creates {theirs}, "
            f"the chief {chiefs}. Start all of them with the same command and the same files."
        )
    if outcome.missing:
        raise TimeoutError(
            f"All {job.num_workers} workers must connect within {seconds:g} s, and {_missing(job, outcome)} did not. "
            "Check the output of that worker, and that its address in TF_CONFIG is right and reachable from the other "
            f"workers; if it only starts slowly, set a longer strategy.form_seconds.{outcome.remark}"
        )


def _missing(job: tf_config.JobConfig, outcome: Outcome) -> str:
    """Return the missing addresses, each with the reason why it cannot be reached, if known."""
    reasons = outcome.reasons
    if job.rank == 0:
        reasons = reachability.problems(outcome.missing[:_MOST_ASKED], _ASK_SECONDS)
    return ", ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in outcome.missing)

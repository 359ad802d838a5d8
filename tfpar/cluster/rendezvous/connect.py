"""The rendezvous of all workers, called by each of them."""

from __future__ import annotations

import os
import sys

from tfpar.cluster import job_secret, reachability, tf_config
from tfpar.cluster.rendezvous import chief, worker
from tfpar.cluster.rendezvous.messages import Keep, Outcome

_MOST_ASKED, _ASK_SECONDS = 16, 2.0


def connect_workers(job: tf_config.JobConfig, seconds: float, keep: Keep | None = None, strategy: str = "") -> None:
    """Wait until all workers of a job are connected; every worker must call it.

    Args:
        job: The job and the rank of this process in it.
        seconds: The time limit.
        keep: Takes the open connections for heartbeats: the chief those to all workers, each worker that to the chief.
            None closes them.
        strategy: The strategy that this process creates, which must be the same in all, since processes with different
            ones would wait for each other for ever.

    Raises:
        TimeoutError: If workers are missing; on every worker, with their addresses.
        ValueError: If workers create different strategies; or if the chief refuses this worker's TFPAR_JOB_SECRET, or
            it is too short.
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
    found = (chief.gather if job.rank == 0 else worker.report)(job, seconds, secret, keep, strategy)
    if found.difference is not None:
        rank, theirs, chiefs = found.difference
        raise ValueError(
            f"All workers must create the same strategy, and worker {rank} ({job.addresses[rank]}) creates {theirs}, "
            f"the chief {chiefs}. Start all of them with the same command and the same files."
        )
    if found.missing:
        raise TimeoutError(
            f"All {job.num_workers} workers must connect within {seconds:g} s, and {_named(job, found)} did not. "
            "Check the output of that worker, and that its address in TF_CONFIG is right and reachable from the other "
            f"workers; if it only starts slowly, set a longer strategy.form_seconds.{found.remark}"
        )


def _named(job: tf_config.JobConfig, found: Outcome) -> str:
    """Return missing addresses, each with the reason why the chief, or a worker without the chief, cannot connect."""
    reasons = found.reasons
    if job.rank == 0:
        reasons = reachability.problems(found.missing[:_MOST_ASKED], _ASK_SECONDS)
    return ", ".join(f"{one} ({reasons[one]})" if one in reasons else one for one in found.missing)

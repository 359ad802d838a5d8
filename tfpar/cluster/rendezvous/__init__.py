"""The workers of a job join before TensorFlow starts, so that a missing one is named in time.

    worker 1   connect ── challenge ── rank, proof ──┐               ┌── proof, "" ── all start TensorFlow
    worker 2   connect ── challenge ── rank, proof ──┤ chief listens ┤
                                                     └ form_seconds ─┴── proof, missing ── all raise the same error

TensorFlow 2.21 cannot do this: its chief waits for ever for a worker that never appears, deaf to Ctrl-C and SIGTERM,
and holds Python's lock meanwhile; its workers give up about 20 seconds late. The chief listens on the port that
TensorFlow takes afterwards, so no other port need be open.

Both sides prove that they have the job's secret (`job_secret`), by an HMAC over the random challenges of both: a
program that does not have it can neither take a worker's place nor answer for the chief. The network can be hostile:
whatever connects, sends or is silent costs the chief no more than a bounded number of connections.

    messages   what is sent, and how it is proved
    chief      one poll over all connections
    worker     connects until the chief answers
"""

from __future__ import annotations

import os
import sys

from tfpar.cluster import job_secret, tf_config
from tfpar.cluster.rendezvous import chief, worker


def join(job: tf_config.Job, seconds: float) -> None:
    """Wait until all workers of a job are there; all must call it.

    Args:
        job: The job and the place of this process in it.
        seconds: How long to wait.

    Raises:
        TimeoutError: If a worker does not appear; on every worker, with the addresses that are missing.
        ValueError: If the chief refuses this worker's TFPAR_JOB_SECRET, or it is too short.
        OSError: If the chief's port is taken.

    Example:
        >>> from tfpar.cluster.tf_config import Job
        >>> join(Job(("localhost:2222",), rank=0, role="chief"), seconds=300)
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
    missing, remark = (chief.gather if job.rank == 0 else worker.report)(job, seconds, secret)
    if missing:
        raise TimeoutError(
            f"All {job.num_workers} workers must appear within {seconds:g} s, and {', '.join(missing)} did not. Look "
            "at the output there, and whether that address in TF_CONFIG is right and can be reached from the others; "
            f"if it only starts slowly, set a longer strategy.form_seconds.{remark}"
        )

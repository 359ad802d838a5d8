"""The program of a worker that the doctor starts on this machine: it answers the chief, and ends with it."""

from __future__ import annotations

import os
import signal
import sys

from tfpar.checks import child_processes, workers
from tfpar.cluster import job_secret, tf_config

_SECONDS = 120


def main() -> int:
    """Answer the chief until it ends the examination; return the exit code."""
    child_processes.end_with_parent()
    signal.alarm(_SECONDS)
    job = tf_config.from_environment(os.environ)
    assert job is not None
    return 0 if workers.serve(job, job_secret.from_environment(os.environ), _SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())

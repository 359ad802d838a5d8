"""The program of a worker that the doctor starts on this machine: it answers the chief, and ends with it."""

from __future__ import annotations

import os
import signal
import sys

from tfpar.checks import workers
from tfpar.cluster import job_secret, tf_config
from tfpar.commands import parent_process

_SECONDS = 120


def main() -> int:
    """Answer the chief until it ends the examination; return the exit code."""
    parent_process.end_with_parent()
    signal.alarm(_SECONDS)
    job = tf_config.from_environment(os.environ)
    assert job is not None
    return 0 if workers.serve(job, job_secret.from_environment(os.environ), _SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())

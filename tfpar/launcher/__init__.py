"""Starts the workers of a job on this machine, watches them, and starts them again when one fails; Linux only.

    job        how often all start; what the user is told at the end
    attempt    the workers of one start, until the last is gone
    worker     one process: its environment, its cores, its two streams
    lines      a stream of bytes, cut into lines
    output     where the lines go, without waiting for a slow reader
    requests   the signals with which somebody stops the job
    guardian   ends what is left when the launcher itself is killed
    network    a network of the job's own, where the user asks for it

No module of it knows TensorFlow.
"""

from tfpar.launcher.job import Job, launch

__all__ = ["Job", "launch"]

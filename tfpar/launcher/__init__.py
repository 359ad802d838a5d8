"""Starts the workers of a job on this machine, watches them, and starts them again when one fails; Linux only.

    job                how often all start; the report at the end
    worker_group       the workers of one start, until the last has ended
    worker             one process: its environment, its cores, its two streams
    line_splitter      a stream of bytes, cut into lines
    log_output         where the lines go, without waiting for a slow reader
    stop_signals       the signals that stop the job
    reaper             ends what is left when the launcher itself is killed
    network_namespace  a network of the job's own, where the user asks for it
    manifests          files that start the same job on a cluster

No module of it knows TensorFlow.
"""

from tfpar.launcher.job import Job, launch

__all__ = ["Job", "launch"]

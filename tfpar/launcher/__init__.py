"""The launcher: it starts the workers of a job on this machine, and restarts them after a failure; Linux only.

    job                starts and restarts, and the report at the end
    worker_group       the workers of one start
    worker             one process: its environment, its cores, its two streams
    reserved_ports     ports that no other program gets before the workers listen
    hosts              the workers of one host in a job over several hosts
    gpu_division       the GPUs of each worker
    line_splitter      a stream of bytes, split into lines
    log_output         non-blocking output of the workers' lines
    stop_signals       the signals that stop the job
    manifests          batch scripts and manifests for clusters

It imports no TensorFlow.
"""

from tfpar.launcher.job import Job, launch

__all__ = ["Job", "launch"]

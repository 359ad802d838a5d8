"""The launcher: starts the workers of a job on this machine and restarts them after a failure. Linux only.

    job                restarts, exit code, final report
    worker_group       the worker processes of one attempt
    worker             one worker process: environment, cores, output streams
    reserved_ports     ports reserved until the workers listen on them
    hosts              this host's workers in a job over several hosts
    gpu_division       the GPUs of each worker
    log_output         non-blocking output of the workers' lines
    stop_signals       signals that stop the job
    manifests          batch scripts and manifests for clusters

It does not import TensorFlow.
"""

from tfpar.launcher.job import Job, launch

__all__ = ["Job", "launch"]

"""The error that a worker raises because another worker failed."""

# The beginning of the message that workers print when they lose another one.
LOST = "A worker of the job is lost"


class OtherWorkerError(ConnectionError):
    """Another worker failed with an error that a restart may not repeat; the message is that of its error.

    All workers raise it at the same point. It has its own exit code, so that the launcher can name the worker that
    failed, whichever process ends first.

    Example:
        >>> raise OtherWorkerError("[Errno 28] No space left on device: 'run/latest.ckpt'")
        Traceback (most recent call last):
        tfpar.cluster.other_worker_error.OtherWorkerError: [Errno 28] No space left on device: 'run/latest.ckpt'
    """

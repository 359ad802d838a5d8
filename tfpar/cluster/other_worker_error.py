"""The error that one worker raises because another one failed."""

# How the message of a worker begins that misses another one, in the train command and in scripts.
LOST = "A worker of the job is lost"


class OtherWorkerError(ConnectionError):
    """Another worker failed with an error that a new start may not repeat; the message is that error's.

    Every worker raises at the same place. The command ends with an exit code of its own, so that the launcher names the
    worker with the cause, whichever process ends first.

    Example:
        >>> raise OtherWorkerError("[Errno 28] No space left on device: 'run/latest.ckpt'")
        Traceback (most recent call last):
        tfpar.cluster.other_worker_error.OtherWorkerError: [Errno 28] No space left on device: 'run/latest.ckpt'
    """

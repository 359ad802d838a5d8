"""Failures of TensorFlow on one worker alone, such as unreadable data: the other workers raise its reason at once.

worker 0   step ─── step ─── all-reduce ─ raises the reason of worker 1
                                          ▲
worker 1   step ─── step ─── fails ─ report to TensorFlow's coordination service, raises its own error
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_distribute
from tfpar.cluster import reachability, tf_config
from tfpar.messages.received import MAX_SENTENCE, excerpt
from tfpar.strategies.multi_worker.consensus import is_raised_on_all_workers

# Errors that TensorFlow raises on the other workers after the loss of one.
OF_LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError,
                  tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError)  # fmt: skip
_REPORTED = re.compile(r"Worker \d+ \(\S*\) failed: .*?(?=\\n|\n|$)")


class WorkerLostError(ConnectionError):
    """Another worker of the job failed, or can no longer be reached.

    The methods of `tfpar.Trainer`, and `tfpar.fit`, `tfpar.evaluate` and `tfpar.predict`, raise it on the other workers
    instead of TensorFlow's errors of the network. The workers cannot communicate any more: end the process.

    Example:
        >>> try:
        ...     trainer.fit(dataset, checkpoints=tfpar.Checkpoints("checkpoints"))
        ... except tfpar.WorkerLostError as error:
        ...     raise SystemExit(f"{error}")
    """


class Failures:
    """Reports of this worker's failures, and the errors for those of others.

    Args:
        rank: The rank of this worker.
        address: Its address.
    """

    def __init__(self, rank: int, address: str) -> None:
        self._worker = f"Worker {rank} ({address})"

    def sentence(self, error: tf.errors.OpError, user_message: data.UserMessage) -> str:
        """Return the sentence for other workers about an error of this worker.

        Args:
            error: The error.
            user_message: Returns a sentence about an error of the data, None for other errors.
        """
        cause = user_message(error) or data.cause_of(error)
        return f"{self._worker} failed: {excerpt(cause, MAX_SENTENCE)}"

    @contextlib.contextmanager
    def reported(self, user_message: data.UserMessage) -> Iterator[None]:
        """Report an error of TensorFlow inside this context to all workers, and raise those of other workers.

        After a report no worker can communicate any more.

        Args:
            user_message: As for `sentence`.

        Raises:
            ValueError: If the data of another worker cannot be read, with its reason.
            WorkerLostError: If another worker fails for another reason, or can no longer be reached.
        """
        try:
            yield
        except tf.errors.OpError as error:
            if found := _REPORTED.search(error.message):
                repeats = isinstance(error, tf.errors.InvalidArgumentError)
                raise (ValueError if repeats else WorkerLostError)(found[0]) from error
            if user_message(error) is None and (lost := lost_worker(error)):
                raise lost from None  # TensorFlow's traceback says nothing more; it stays in __context__
            if not isinstance(error, OF_LOST_WORKER) and not is_raised_on_all_workers(error):
                code = tf.errors.INVALID_ARGUMENT if user_message(error) else tf.errors.ABORTED
                tf_distribute.report_failure(code, self.sentence(error, user_message))
            raise


def lost_worker(error: tf.errors.OpError) -> WorkerLostError | None:
    """Return the error to raise for one after the loss of another worker; None for any other error.

    Args:
        error: The error of a TensorFlow operation.
    """
    job = tf_config.from_environment(os.environ)
    if job is None or job.num_workers == 1 or not isinstance(error, OF_LOST_WORKER):
        return None
    _, _, unhealthy = error.message.partition("unhealthy")
    silent = [job.addresses[int(rank)] for rank in re.findall(r"/task:(\d+)", unhealthy)]
    if missing := reachability.unreachable(job, 2.0):
        reason = "no heartbeat" if silent or isinstance(error, tf.errors.DeadlineExceededError) else reason_of(error)
        who = f"{', '.join(missing)} no longer respond{'s' * (len(missing) == 1)} ({reason})"
    elif silent:
        who = f"no heartbeat of {', '.join(dict.fromkeys(silent))}"
    elif isinstance(error, tf.errors.InternalError):  # such as one of XLA on this worker alone
        return None
    else:
        chief = "it is the chief if the other workers print the same"
        who = f"it responds, but makes no progress; {chief} ({reason_of(error)})"
    return WorkerLostError(
        f"A worker of the job is lost: {who}. Start all workers again with the "
        "same command, which resumes from the last checkpoint; python -m tfpar.launch --max_restarts does so "
        "automatically."
    )


def reason_of(error: tf.errors.OpError) -> str:
    """Return the part of TensorFlow's message with the cause."""
    found = re.search(r"aborted by: (.+)", error.message) or re.search(r"\S.*", error.message)
    return found[found.re.groups][:160] if found else type(error).__name__

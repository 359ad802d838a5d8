"""The error for lost workers, with their addresses and the reason."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar.cluster import reachability, tf_config
from tfpar.cluster.other_worker_error import LOST
from tfpar.config.sections import A_WEEK_SECONDS
from tfpar.job import UserMessage

# The errors that TensorFlow raises on the remaining workers after one is lost.
OF_LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError,
                  tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError)  # fmt: skip

_OF_NETWORK = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError,
               tf.errors.DeadlineExceededError)  # fmt: skip


class WorkerLostError(ConnectionError):
    """Another worker of the job failed or can no longer be reached.

    The methods of `tfpar.Trainer`, and `tfpar.fit`, `tfpar.evaluate` and `tfpar.predict`, raise it on the remaining
    workers instead of TensorFlow's network errors. The workers can no longer communicate, so end the process.

    Example:
        >>> try:
        ...     trainer.fit(dataset, checkpoints=tfpar.Checkpoints("checkpoints"))
        ... except tfpar.WorkerLostError as error:
        ...     raise SystemExit(f"{error}")
    """


def check_seconds(form_seconds: float, silence_seconds: float) -> None:
    """Check that the time limits of a job are in range.

    Raises:
        ValueError: If one is not.
    """
    if not (0 < form_seconds <= A_WEEK_SECONDS and 1 <= silence_seconds <= A_WEEK_SECONDS):
        raise ValueError(
            f"form_seconds must be above 0 and silence_seconds at least 1, both at most {A_WEEK_SECONDS} (a week), "
            f"received {form_seconds} and {silence_seconds}."
        )


@contextlib.contextmanager
def naming_lost_workers(
    user_message: UserMessage, detected: Callable[[], WorkerLostError | None] = lambda: None
) -> Iterator[None]:
    """Convert TensorFlow's errors after the loss of a worker into `WorkerLostError` in this context.

    Args:
        user_message: Returns a sentence about a data error, and None for other errors.
        detected: Returns the error for a loss detected by other means, such as heartbeats.
    """
    try:
        with tf_function.unexplained_errors(_OF_NETWORK):
            yield
    except tf.errors.OpError as error:
        is_of_others = isinstance(error, OF_LOST_WORKER) and user_message(error) is None
        if is_of_others and (lost := detected() or lost_worker(error)):
            raise lost from None  # TensorFlow's traceback says nothing more; it stays in __context__
        raise
    except RuntimeError as error:
        # TensorFlow 2.21 (TFE_ContextGetGraphDebugInfo) raises it while it explains the error of a lost worker.
        unavailable = tf.errors.UnavailableError(None, None, "connection lost")
        if "null not valid" in str(error) and (lost := detected() or lost_worker(unavailable)):
            raise lost from error
        raise


def lost_worker(error: tf.errors.OpError) -> WorkerLostError | None:
    """Return the error for a lost worker if `error` is its consequence, else None."""
    job = tf_config.from_environment(os.environ)
    if job is None or job.num_workers == 1 or not isinstance(error, OF_LOST_WORKER):
        return None
    _, _, unhealthy = error.message.partition("unhealthy")
    silent = [job.addresses[int(rank)] for rank in re.findall(r"/task:(\d+)", unhealthy)]
    if missing := reachability.unreachable(job, 2.0):
        reason = (
            "no heartbeat" if silent or isinstance(error, tf.errors.DeadlineExceededError) else failure_reason(error)
        )
        who = f"{', '.join(missing)} no longer respond{'s' * (len(missing) == 1)} ({reason})"
    elif silent:
        who = f"no heartbeat of {', '.join(dict.fromkeys(silent))}"
    elif isinstance(error, tf.errors.InternalError):  # such as an XLA error on this worker only
        return None
    else:
        chief = "it is the chief if the other workers print the same"
        who = f"it responds, but makes no progress; {chief} ({failure_reason(error)})"
    return lost_worker_error(who)


def lost_worker_error(who: str) -> WorkerLostError:
    """Return the error for lost workers, described by a clause with their addresses and the reason."""
    return WorkerLostError(
        f"{LOST}: {who}. Start all workers again with the "
        "same command, which resumes from the last checkpoint if there is one; python -m tfpar.launch --max_restarts "
        "does so automatically."
    )


def failure_reason(error: tf.errors.OpError) -> str:
    """Return the cause in TensorFlow's message."""
    match = re.search(r"aborted by: (.+)", error.message) or re.search(r"\S.*", error.message)
    return match[match.re.groups][:160] if match else type(error).__name__

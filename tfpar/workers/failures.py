"""Failures of TensorFlow on one worker alone, such as unreadable data: the other workers raise its reason at once.

worker 0   step ─── step ─── all-reduce ─ raises the reason of worker 1
                                          ▲
worker 1   step ─── step ─── fails ─ report to TensorFlow's coordination service, raises its own error
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_distribute
from tfpar.job import UserMessage, is_raised_on_all_workers
from tfpar.messages.received import MAX_SENTENCE, excerpt
from tfpar.workers.lost_workers import OF_LOST_WORKER, WorkerLostError, lost_worker

_REPORTED = re.compile(r"Worker \d+ \(\S*\) failed: .*?(?=\\n|\n|$)")


class Failures:
    """Reports of this worker's failures, and the errors for those of others.

    Args:
        rank: The rank of this worker.
        address: Its address.
    """

    def __init__(self, rank: int, address: str) -> None:
        self._worker = f"Worker {rank} ({address})"

    def sentence(self, error: tf.errors.OpError, user_message: UserMessage) -> str:
        """Return the sentence for other workers about an error of this worker.

        Args:
            error: The error.
            user_message: Returns a sentence about an error of the data, None for other errors.
        """
        cause = user_message(error) or data.cause_of(error)
        return f"{self._worker} failed: {excerpt(cause, MAX_SENTENCE)}"

    @contextlib.contextmanager
    def reported(self, user_message: UserMessage) -> Iterator[None]:
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

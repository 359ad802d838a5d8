"""Propagation of a TensorFlow error on one worker, such as unreadable data, to the other workers.

worker 0   step ─── step ─── all-reduce ─ raises the error of worker 1
                                          ▲
worker 1   step ─── step ─── fails ─ reports to TensorFlow's coordination service, raises its error
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
    """Report failures of this worker, and raise those reported by others."""

    def __init__(self, rank: int, address: str) -> None:
        self._worker = f"Worker {rank} ({address})"

    def sentence(self, error: tf.errors.OpError, user_message: UserMessage) -> str:
        """Describe an error of this worker in a sentence for the other workers.

        Args:
            error: The error.
            user_message: Returns a sentence about a data error, and None for other errors.
        """
        return f"{self._worker} failed: {excerpt(user_message(error) or data.cause_of(error), MAX_SENTENCE)}"

    @contextlib.contextmanager
    def reported(self, user_message: UserMessage) -> Iterator[None]:
        """Report TensorFlow errors raised in this context to all workers, and raise the reported errors of others.

        After a report, the workers can no longer communicate.

        Args:
            user_message: As in `sentence`.

        Raises:
            ValueError: If another worker cannot read its data.
            WorkerLostError: If another worker failed for another reason, or cannot be reached.
        """
        try:
            yield
        except tf.errors.OpError as error:
            if reported := _REPORTED.search(error.message):
                repeats = isinstance(error, tf.errors.InvalidArgumentError)
                raise (ValueError if repeats else WorkerLostError)(reported[0]) from error
            if user_message(error) is None and (lost := lost_worker(error)):
                raise lost from None  # TensorFlow's traceback says nothing more; it stays in __context__
            if not isinstance(error, OF_LOST_WORKER) and not is_raised_on_all_workers(error):
                code = tf.errors.INVALID_ARGUMENT if user_message(error) else tf.errors.ABORTED
                tf_distribute.report_failure(code, self.sentence(error, user_message))
            raise

"""Methods of a trainer that report the failure of one worker to all, and explain TensorFlow's errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import tensorflow as tf

from tfpar import data, process_lock
from tfpar._compat.graphs import tf_tapes
from tfpar.loops import memory_errors
from tfpar.loops.agreement import barriers
from tfpar.strategies import Strategy
from tfpar.workers.lost_workers import WorkerLostError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# `engines/steps/hidden_errors.py` finds the cause, unless it is on another worker or does not occur again.
_OTHERS_CANCELLED = (
    "An operation of one stage failed, and TensorFlow reports that it cancelled the others. The cause is in its log, "
    "in a line 'Local rendezvous is aborting with status'; start with TF_CPP_MIN_LOG_LEVEL=0 to see it, or train "
    "on SingleDevice()."
)


class _Trainer(Protocol):
    strategy: Strategy


Self = TypeVar("Self", bound=_Trainer)


def reported(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Wrap a method of a trainer that all workers must call, one thread at a time.

    If it fails on one worker, all workers raise an error; some errors of TensorFlow are replaced by clearer ones.
    """

    @functools.wraps(method)
    def call(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{method.__name__} runs steps from Python, and was called inside of a tf.function or a graph. Call it "
                "outside; TensorFlow must not be in graph mode, as after tf.compat.v1.disable_eager_execution()."
            )
        is_recordable = method.__name__ == "predict" and not self.strategy.engine.cuts_model
        if len(self.strategy.device_names) > 1 and not is_recordable and tf_tapes.is_recording():
            raise RuntimeError(
                f"{method.__name__} was called inside of a tf.GradientTape, which cannot record steps on several "
                "devices. Call it outside, or in `with tape.stop_recording():`."
            )
        try:
            with _explaining_ends(method.__name__), self.strategy.job.reported():
                barriers.barrier(self.strategy.job, method.__name__)
            with process_lock.ProcessLock(), self.strategy.job.reported():
                return method(self, *args, **kwargs)
        except tf.errors.AlreadyExistsError as error:  # such as the file of a cache
            raise type(error)(error.node_def, error.op, data.cause_of(error)) from error
        except tf.errors.InvalidArgumentError as error:
            if sentence := data.differing_rows(error.message):
                raise ValueError(sentence) from error
            if sentence := data.label_out_of_range(error.message):
                raise type(error)(error.node_def, error.op, sentence) from error
            raise
        except tf.errors.CancelledError as error:
            if not self.strategy.engine.cuts_model:
                raise
            raise type(error)(error.node_def, error.op, _OTHERS_CANCELLED) from error
        except tf.errors.ResourceExhaustedError as error:
            sentence = memory_errors.explain(error)
            if sentence is None:
                raise
            raise type(error)(error.node_def, error.op, sentence) from error

    return call


@contextlib.contextmanager
def _explaining_ends(method: str) -> Iterator[None]:
    """Add to the error about a lost worker that its program may have ended without this call."""
    try:
        yield
    except WorkerLostError as error:
        raise WorkerLostError(
            f"{error} If its program has ended without a call of {method}, call it on every worker, even if only "
            "the chief uses the result."
        ) from None

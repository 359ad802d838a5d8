"""What every strategy supplies: where the model is built, how data reaches the devices, how one step runs."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model, keras_variables
from tfpar.pipeline.schedule.simulator import Timeline
from tfpar.reduction import metric_logs
from tfpar.strategies.model_checks import check_variables
from tfpar.strategies.multi_step import SECONDS_PER_CALL
from tfpar.strategies.preview import Preview, ReplicaRow, replicas_table


class Distributed(NamedTuple):
    """A dataset whose elements the steps of a strategy take.

    Args:
        dataset: The elements.
        uneven_end: Whether workers may run out of examples at different times; then its elements never end, and the
            workers agree on when to stop.
    """

    dataset: tf.data.Dataset
    uneven_end: bool = False


class Strategy(abc.ABC):
    """Where and how one step runs.

    A strategy owns the scope in which the model is built, the way a dataset reaches its devices, and one train,
    evaluate and predict step. The loops around the steps are the trainer's, the same for every strategy. The three
    steps are called while a `tf.function` is traced, on one element of the dataset that `distribute` returned.

    Example:
        >>> strategy: tfpar.Strategy = tfpar.Mirrored(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas, strategy.num_workers, strategy.is_chief
        (2, 1, True)
    """

    # The tf.distribute strategy that weights belong to; None for those of one device, and of pipelines.
    home: tf.distribute.Strategy | None = None
    devices: Sequence[Any]
    num_replicas: int
    num_workers: int = 1
    rank: int = 0
    steps_multiple: int = 1
    seconds_per_call: float = SECONDS_PER_CALL
    compiles_with_xla: bool = True
    # Whether a step follows a schedule of actions, which `preview` predicts and `trace` times.
    has_schedule: bool = False

    @property
    def is_chief(self) -> bool:
        """Whether this process decides for all workers and writes files."""
        return self.rank == 0

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Say in one line which devices run what."""

    def __repr__(self) -> str:
        """Return the description in a line: a notebook shows which devices there are."""
        return f"<{self.describe()}>"

    @property
    def device_names(self) -> list[str]:
        """The devices of this process that hold the model."""
        return [str(device) for device in self.devices]

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Say what a step will be like: the devices, each with the whole model; all workers must ask.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: This process's part of a global batch, `(inputs, targets, sample_weight)` as far as given.
        """
        num_local_replicas = max(1, self.num_replicas // self.num_workers)
        weights, trained = list(model.variables), list(model.trainable_variables)
        gradient_bytes = _num_bytes(trained)
        row = ReplicaRow(
            device="",
            num_examples=-(-int(data.num_rows(batch)) // num_local_replicas),
            num_parameters=model.count_params(),
            state_bytes=_num_bytes(weights) + gradient_bytes + _num_bytes(model.optimizer.variables),
            gradient_bytes=gradient_bytes,
        )
        rows = tuple(dataclasses.replace(row, device=name) for name in self.device_names)
        return Preview(replicas_table(self.describe(), rows, self.num_replicas), rows)

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of parts of a global batch, and the noun for what computes or contains one."""
        return self.num_replicas, "replica"

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a scheduled step runs.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: A global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If the strategy has no schedule.
        """
        raise ValueError(f"Only a pipeline has a schedule to trace, and the strategy is {self.describe()}.")

    @abc.abstractmethod
    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Turn global batches into elements that the steps take."""

    @abc.abstractmethod
    def local_batch(self, element: Any) -> Any:
        """Return the batch of examples behind one element of the dataset that `distribute` returned."""

    @abc.abstractmethod
    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the size of the global batch behind an element, an int64 scalar; may communicate."""

    def has_more(self, upcoming: tf.experimental.Optional, distributed: Distributed) -> tf.Tensor:
        """Say whether any worker has examples in the upcoming element, a boolean scalar; may communicate."""
        return upcoming.has_value()

    def holds(self, variable: keras.Variable) -> bool:
        """Say whether the memory of a variable is where this strategy's steps expect it."""
        return keras_variables.home_of(variable) is self.home

    def adopt(self, model: keras.Model) -> None:
        """Move what was created outside of this strategy's scope into it: weights, optimizer, metrics, random state.

        So a model that was built, or compiled again, anywhere trains here from the state that it has. The Keras
        objects stay the same, only their memory is allocated again; where nothing is to be moved this costs a look at
        each variable.

        Args:
            model: Any model, built and compiled as far as it may be.

        Raises:
            ValueError: If the model holds variables that are no Keras variables.
        """
        away = [variable for variable in keras_variables.state(model) if not self.holds(variable)]
        if {id(variable) for variable in away} & {id(weight) for weight in model.variables}:
            check_variables(model, self.home)
        for variable in away:
            self._move(variable)
        if away or keras_variables.belongs_to(model) is not self.home or keras_variables.has_lost_slots(model):
            keras_variables.move_trainer(model, self.home)

    def _move(self, variable: keras.Variable) -> None:
        # It is read where it was: within a scope TensorFlow refuses the variables of another strategy.
        value = tf.convert_to_tensor(variable.value) if keras_variables.is_allocated(variable) else None
        with self.scope():
            keras_variables.re_create(variable, value)
        if keras_model.is_summed_on_read(variable) and value is not None:  # each replica begins with all of it
            self.assign(variable, value)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Let the weights of a model live where they belong, before the optimizer makes its state beside them.

        Args:
            model: A compiled model.
            batch: The first global batch, `(inputs, targets, sample_weight)` as far as given.
            training: Whether train steps follow, or those that evaluate or predict.

        Raises:
            ValueError: If there is no place for them.
        """
        return  # a scope has placed them

    @abc.abstractmethod
    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Check, before the first step, that this model can be trained here exactly.

        Args:
            model: A built and compiled model.
            batch: The first global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If it cannot; the message names what stands in the way.
        """

    def prepare_outputs(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Check, before the first step of a kind, that the model's outputs are those of one device.

        Args:
            model: A built model.
            batch: The first batch, `(inputs,)` or with more.
            training: Whether train steps follow, or those that evaluate or predict.

        Raises:
            ValueError: If they are not.
        """
        return  # one copy of the model computes what one device does

    def prepare_loss(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Check, before the first step of a kind, that what an overridden `compute_loss` returns is exact here.

        Args:
            model: A model that `prepare` has seen.
            batch: The first global batch.
            training: Whether train steps follow, or evaluate steps; `compute_loss` is told the same.

        Raises:
            ValueError: If it is not.
        """
        return  # one device needs no check

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the compiled loop over train or evaluate steps is called."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on one element of the distributed dataset; return the loss, a scalar."""

    @abc.abstractmethod
    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from one element of the distributed dataset; return the loss, a scalar."""

    @abc.abstractmethod
    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch."""

    @abc.abstractmethod
    def end_call(self, model: keras.Model) -> None:
        """Do what may wait until several train steps have run; traced behind them, before the metrics are read."""

    @abc.abstractmethod
    def finalize_weights(self, model: keras.Model) -> None:
        """Do what the optimizer leaves for the end of training: overwrite the weights with their moving average."""

    def metric_results(self, model: keras.Model) -> dict[str, tf.Tensor]:
        """Return the logs over the examples of all workers: the metrics' results, and what `compute_metrics` adds."""
        return metric_logs.results(model)

    def metric_parts(self, model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return what each replica of all workers has counted, `[replicas, ...]`, by variable; all workers must ask.

        A checkpoint holds it beside the sums, so that a resumed run adds up in the same order as an undisturbed one.
        """
        return []  # one copy holds all

    def assign_parts(self, variable: keras.Variable, parts: np.ndarray) -> None:
        """Give each replica its part back, `[replicas, ...]`, if there are as many; the sum is assigned already."""
        return  # one copy holds the sum

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`."""
        variable.assign(value)

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of some numbers over all workers, who must all ask; outside of a step."""
        return np.asarray(values, "float64")

    def barrier(self) -> None:
        """Return when all workers have called this method; outside of a step."""
        self.all_reduce_sum([0.0])

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the chief's message on every worker, who must all ask; outside of a step.

        Args:
            message: What the chief sends; the others' is not looked at.
        """
        assert message is not None
        return message

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all workers judge their own data and settings; where one raises, all raise.

        Nothing that communicates between the workers may be called in it after what may raise.
        """
        return contextlib.nullcontext()

    def require_equal(self, facts: dict[str, str]) -> None:
        """Refuse to train with workers that differ in a fact, such as a version; all workers must ask.

        Args:
            facts: Texts by what they are.

        Raises:
            ValueError: If a worker's text is not the chief's; on every worker.
        """
        return  # one worker is equal to itself


def _num_bytes(variables: Sequence[keras.Variable]) -> int:
    return sum(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size for variable in variables)

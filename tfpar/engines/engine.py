"""How a step runs: the scope of a model, the distribution of data, the steps, and the state in memory."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_distribute
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.engines.distributed import Distributed
from tfpar.engines.model_checks import check_variables
from tfpar.engines.preview import Preview, ReplicaRow, replicas_table
from tfpar.engines.steps.batches_ahead import HOST, StepBatch
from tfpar.engines.steps.multi_step import SECONDS_PER_CALL
from tfpar.job import Job
from tfpar.placement.owners import num_bytes
from tfpar.reduction import metric_logs
from tfpar.reduction.verdict import Verdict

if TYPE_CHECKING:
    from tfpar.pipeline.analysis.prediction import Prediction
    from tfpar.pipeline.schedule.simulator import Timeline


class Scheduled(Protocol):
    """What measures a step that follows a schedule of actions; see `tfpar.Pipeline`."""

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a step runs."""

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Measure the stages on a batch and predict a step."""


class Engine(abc.ABC):
    """Run the steps of a model on some devices.

    An engine supplies the scope of the model, the distribution of datasets, and the train, evaluate and predict steps,
    traced in a `tf.function` with the `step_batch` of an element; the trainer supplies the loops around them.
    """

    # The tf.distribute strategy of the weights; None for one device and for pipelines.
    home: tf.distribute.Strategy | None = None
    devices: Sequence[Any]
    num_replicas: int
    steps_multiple: int = 1
    seconds_per_call: float = SECONDS_PER_CALL
    compiles_with_xla: bool = True
    # Whether jit_compile="auto" may mean XLA, which then compiles steps or passes as a whole.
    chooses_xla: bool = False
    # Whether it runs a model's own train_step, test_step and predict_step.
    runs_own_steps: bool = False
    # Whether each worker holds only a part of the optimizer's state (see `whole_state`).
    divides_state: bool = False
    cuts_model: bool = False  # into stages, each with its own forward and backward pass
    # Runs a failed step on an element again to find its error; None where TensorFlow reports it.
    step_again: Callable[[keras.Model, str, Any], None] | None = None

    @functools.cached_property
    def job(self) -> Job:
        """The workers that train the model, of which this process is one."""
        return Job()

    @abc.abstractmethod
    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""

    @property
    def device_names(self) -> list[str]:
        """The devices of this process that hold the model."""
        return [str(device) for device in self.devices]

    def preview(self, model: keras.Model, batch: Any, title: str) -> Preview:
        """Return a preview of a step, with a title: a row for each device of this worker."""
        num_local_replicas = max(1, self.num_replicas // self.job.num_workers)
        gradient_bytes = sum(map(num_bytes, model.trainable_variables))
        weight_bytes = sum(map(num_bytes, model.variables)) + gradient_bytes
        rows = tuple(
            ReplicaRow(
                device=name,
                num_examples=-(-int(data.num_rows(batch)) // num_local_replicas),
                num_parameters=model.count_params(),
                state_bytes=weight_bytes + sum(map(num_bytes, self._slots_on(model, number))),
                gradient_bytes=gradient_bytes,
            )
            for number, name in enumerate(self.device_names)
        )
        return Preview(replicas_table(title, rows, self.num_replicas), rows)

    def _slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the variables of the optimizer that a device of this process holds.

        Args:
            model: A built and compiled model.
            device: The number of the device.
        """
        return list(model.optimizer.variables)

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return the context in which optimizers create their slots, within the scope.

        Args:
            model: A compiled model with built layers.
        """
        return contextlib.nullcontext()

    def whole_state(self, model: keras.Model, folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief reads all of the optimizer's state; all workers must enter it."""
        return contextlib.nullcontext()  # it has all of it

    @property
    def scheduled(self) -> Scheduled | None:
        """What measures the schedule of a step; None where a step has none."""
        return None

    @property
    def step_device(self) -> str | None:
        """The device of the operations of a step that request none; None for the host."""
        return None

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of parts of a global batch, and the noun for what computes or contains one."""
        return self.num_replicas, "replica"

    @abc.abstractmethod
    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return a dataset of elements for the steps from global batches or shards."""

    def _holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is allocated on the devices of this strategy."""
        return keras_variables.home_of(variable) is self.home and not sharded_memory.is_divided(variable)

    def move_model(self, model: keras.Model) -> None:
        """Move the variables of a model to this strategy: weights, optimizer, metrics, random state.

        A model that was built or compiled elsewhere then trains here with its current state, in the same Keras objects.

        Args:
            model: Any model, built and compiled as far as it may be.

        Raises:
            ValueError: If the model has variables that are no Keras variables.
        """
        away = [variable for variable in keras_variables.state(model) if not self._holds(variable)]
        if {id(variable) for variable in away} & {id(weight) for weight in model.variables}:
            check_variables(model, self.home)
        for variable in away:
            self._move(variable)
        if away or keras_variables.belongs_to(model) is not self.home or keras_variables.has_lost_slots(model):
            keras_variables.move_trainer(model, self.home)

    def _move(self, variable: keras.Variable) -> None:
        # Read before the scope begins: in a scope, TensorFlow refuses to read variables of another strategy.
        value = tf.convert_to_tensor(variable.value) if keras_variables.is_allocated(variable) else None
        with self.creation_scope():
            keras_variables.re_create(variable, value)
        if tf_distribute.is_summed_on_read(variable) and value is not None:  # each replica has all of the new value
            self.assign(variable, value)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Place the weights of a model on devices, before the optimizer creates its slots there.

        Args:
            model: A compiled model.
            batch: The first global batch, `(inputs, targets, sample_weight)` as far as given.
            training: Whether train steps follow; otherwise evaluate or predict steps.

        Raises:
            ValueError: If the weights do not fit.
        """
        return  # the scope places them

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Find out before the first step of a kind how parts of a batch give the whole, or refuse the model.

        Args:
            model: A built model; for "train" and "evaluate" a compiled one.
            batch: The first batch, `(inputs, targets, sample_weight)` as far as given.
            kind: "train", "evaluate" or "predict": what the next steps do.

        Raises:
            ValueError: If the parts of a batch cannot give the whole; the message names the reason.
        """
        return  # one device computes the whole batch

    def verdict(self, model: keras.Model) -> Verdict | None:
        """Return what the study of a model found for training; None where one device computes the whole batch.

        Args:
            model: A model after `study`.
        """
        return None

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for calls of the compiled loop of train or evaluate steps."""
        return contextlib.nullcontext()

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch of a train or evaluate step, with the devices that read it; traced ahead of the step.

        Args:
            model: A model after `study`.
            element: An element of the distributed dataset.
        """
        return StepBatch(element, [HOST] * len(tf.nest.flatten(element)))

    @abc.abstractmethod
    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on a batch of `step_batch`; return the loss, a scalar."""

    @abc.abstractmethod
    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from a batch of `step_batch`; return the loss, a scalar."""

    @abc.abstractmethod
    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch."""

    @abc.abstractmethod
    def end_call(self, model: keras.Model) -> None:
        """Complete a call of several train steps; traced after them, before the metrics are read."""

    @abc.abstractmethod
    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average, if the optimizer has one, after training."""

    def metric_results(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        """Return the logs of steps of a kind over the examples of all workers: metric results and other entries."""
        return metric_logs.results(model, kind)

    def metric_parts(self, model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return the metric states of all replicas, `[replicas, ...]`, by variable; all workers must call this.

        A checkpoint contains them next to their sums, so that a resumed run adds in the order of an uninterrupted one.
        """
        return []  # one copy has all of the state

    def assign_parts(self, variable: keras.Variable, parts: np.ndarray) -> None:
        """Restore the metric state of each replica, `[replicas, ...]`, if the number of replicas is the same."""
        return  # one copy has the sum, which is restored already

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`."""
        variable.assign(value)

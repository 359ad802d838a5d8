"""The interface of engines: scope of a model, distribution of data, steps, and state in memory."""

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
from tfpar.recomputation.choice import Recompute
from tfpar.reduction import metric_logs, own_step
from tfpar.reduction.own_step import PartsOfStep
from tfpar.reduction.verdict import Verdict

if TYPE_CHECKING:
    from tfpar.pipeline.analysis.prediction import Prediction
    from tfpar.pipeline.schedule.simulator import Timeline


class Scheduled(Protocol):
    """An engine whose steps follow a schedule of actions, such as that of `tfpar.Pipeline`."""

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a step runs."""

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Predict the time of a step from measurements of its stages."""


class Engine(abc.ABC):
    """Base class of engines, which run the steps of a model on some devices.

    An engine supplies the scope of the model, the distribution of datasets, and the train, evaluate and predict steps.
    Steps are traced in a `tf.function` with the `step_batch` of an element; the trainer supplies the loops around them.

    Attributes:
        home: The `tf.distribute` strategy of the weights; None for one device and for stages.
        devices: The devices of the steps.
        num_replicas: Number of replicas, on all workers together; for `Hybrid`, those of this worker.
        steps_multiple: Calls of the inner loop have a multiple of this number of steps.
        seconds_per_call: Target duration of a call of the inner loop.
        chooses_xla: Whether `jit_compile="auto"` may choose XLA.
        runs_own_steps: Whether it runs a model's own `train_step`, `test_step` and `predict_step`.
        averages_own_steps: Whether it averages the results of replicas that run an own step, without a study.
        divides_state: Whether each worker holds only a shard of the optimizer state (see `whole_state`).
        cuts_model: Whether the model is cut into stages, each with its own forward and backward pass.
        recompute: The layers whose activations the backward pass computes again (see `tfpar.recomputation.choice`).
        step_again: `(model, kind, element)` repeats a failed step to find its error; None where TensorFlow reports it.
    """

    home: tf.distribute.Strategy | None = None
    devices: Sequence[Any]
    num_replicas: int
    steps_multiple: int = 1
    seconds_per_call: float = SECONDS_PER_CALL
    chooses_xla: bool = False
    # Whether it runs a model's own train_step, test_step and predict_step.
    runs_own_steps: bool = False
    averages_own_steps: bool = False
    # Whether each worker holds only a part of the optimizer's state (see `whole_state`).
    divides_state: bool = False
    cuts_model: bool = False
    recompute: Recompute = False
    step_again: Callable[[keras.Model, str, Any], None] | None = None

    @functools.cached_property
    def job(self) -> Job:
        """The workers that train the model together, including this process."""
        return Job()

    @abc.abstractmethod
    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which to create the model and its optimizer."""

    @property
    def device_names(self) -> list[str]:
        """Readable names of `devices`."""
        return [str(device) for device in self.devices]

    def preview(self, model: keras.Model, batch: Any, title: str) -> Preview:
        """Return a preview of a step, with a row per device of this worker."""
        gradient_bytes = sum(map(num_bytes, model.trainable_variables))
        weight_bytes = sum(map(num_bytes, model.variables)) + gradient_bytes
        rows = tuple(
            ReplicaRow(
                device=name,
                num_examples=self._num_examples_on(number, int(data.num_rows(batch))),
                num_parameters=sum(weight.value.shape.num_elements() for weight in model.weights),
                state_bytes=weight_bytes + sum(map(num_bytes, self._slots_on(model, number))),
                gradient_bytes=gradient_bytes,
            )
            for number, name in enumerate(self.device_names)
        )
        return Preview(replicas_table(title, rows, self.num_replicas), rows)

    def _num_examples_on(self, device: int, num_examples: int) -> int:
        """Return how many examples of a local batch a device computes at most, by its index in this process."""
        return num_examples

    def _slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the optimizer variables in the memory of a device, by its index in this process."""
        return list(model.optimizer.variables)

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return a context, within the creation scope, in which optimizers create their slots.

        Args:
            model: A compiled model with built layers.
        """
        return contextlib.nullcontext()

    def whole_state(self, model: keras.Model, folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief reads all of the optimizer state; all workers must enter it.

        Args:
            model: A model with a built optimizer.
            folder: Folder of the chief for a temporary file with the gathered state; None for that of the system.
        """
        return contextlib.nullcontext()  # every worker has all of the state

    @property
    def scheduled(self) -> Scheduled | None:
        """The measurements of a scheduled step; None if the steps follow no schedule."""
        return None

    @property
    def step_device(self) -> str | None:
        """Device of the operations of a step that request none; None for the host."""
        return None

    @property
    def batch_parts(self) -> tuple[int, str]:
        """Number of parts that compute a global batch, and their noun: "replica" or "micro-batch"."""
        return self.num_replicas, "replica"

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts that compute a global batch."""
        number, _ = self.batch_parts
        return (1,) * number

    @abc.abstractmethod
    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Distribute a dataset of global batches or of shards to the steps."""

    def _holds(self, variable: keras.Variable) -> bool:
        """Return True if a variable is allocated on the devices of this engine."""
        return keras_variables.home_of(variable) is self.home and not sharded_memory.is_sharded(variable)

    def move_model(self, model: keras.Model) -> None:
        """Move all state of a model to this engine: weights, optimizer, metrics and random state.

        A model that was built or compiled elsewhere then trains here with its current state, in the same Keras objects.

        Args:
            model: A model, which need not be built or compiled.

        Raises:
            ValueError: If the model has variables that are not Keras variables.
        """
        logged = [variable for metric in own_step.all_last_values(model) for variable in metric.variables]
        away = [variable for variable in (*keras_variables.state(model), *logged) if not self._holds(variable)]
        if {id(variable) for variable in away} & {id(weight) for weight in model.variables}:
            check_variables(model, self.home)
        for variable in away:
            self._move(variable)
        if away or keras_variables.belongs_to(model) is not self.home or keras_variables.has_lost_slots(model):
            keras_variables.move_trainer(model, self.home)

    def _move(self, variable: keras.Variable) -> None:
        # Read outside of the scope, in which TensorFlow refuses to read variables of another strategy.
        value = tf.convert_to_tensor(variable.value) if keras_variables.is_allocated(variable) else None
        with self.creation_scope():
            keras_variables.re_create(variable, value)
        if tf_distribute.is_summed_on_read(variable) and value is not None:  # each replica holds the whole sum
            self.assign(variable, value)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Place the weights of a model on devices, before the optimizer creates its slots there.

        Args:
            model: A compiled model.
            batch: The first global batch, `(inputs, targets, sample_weight)`; the last two are optional.
            training: Whether train steps follow, rather than evaluate or predict steps.

        Raises:
            ValueError: If the weights do not fit.
        """
        return  # the scope places them

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Study how results for parts of a batch combine into those of the whole batch, before the first step.

        Args:
            model: A built model; compiled if `kind` is "train" or "evaluate".
            batch: The first batch, `(inputs, targets, sample_weight)`; the last two are optional.
            kind: Kind of the next steps: "train", "evaluate" or "predict".

        Raises:
            ValueError: If the results for the whole batch cannot be computed in parts; the message gives the reason.
        """
        return  # one device computes the whole batch

    def verdict(self, model: keras.Model) -> Verdict | None:
        """Return the verdict of the study for train steps; None if one device computes the whole batch."""
        return None

    def own_step(self, model: keras.Model) -> PartsOfStep | None:
        """Return what the study of a model's own train step found; None without one, or on one device.

        Args:
            model: A model after `study`.
        """
        return None

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for calls of the compiled loop of train or evaluate steps."""
        return contextlib.nullcontext()

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch of a train or evaluate step and the devices that read it; traced ahead of the step.

        Args:
            model: A model that has been studied.
            element: An element of the distributed dataset.
        """
        return StepBatch(element, [HOST] * len(tf.nest.flatten(element)))

    @abc.abstractmethod
    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Run one train step on the batch of a `step_batch`; return the loss, a scalar."""

    @abc.abstractmethod
    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the metrics with the batch of a `step_batch`; return the loss, a scalar."""

    @abc.abstractmethod
    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the outputs, `[batch, ...]` each, for an element of the distributed dataset."""

    @abc.abstractmethod
    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average after training, if the optimizer keeps one."""

    def logs(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        """Return the logs of a call of steps over the examples of all workers; traced after the steps.

        Args:
            model: A compiled model.
            kind: "train" or "evaluate"; some engines average states after train steps here.
        """
        return metric_logs.results(model, kind)

    def replica_metrics(self, model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return the metric states of each replica, `[replicas, ...]`, by variable; all workers must call this.

        A checkpoint stores them beside their sums, so that a resumed run adds numbers in the same order.
        """
        return []  # the only copy is stored as the sum

    def assign_replicas(self, variable: keras.Variable, parts: np.ndarray) -> None:
        """Restore the metric state of each replica, `[replicas, ...]`, if the number of replicas is unchanged."""
        return  # the only copy is restored from the sum

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`."""
        variable.assign(value)

"""What every strategy supplies: where the model is built, how data reaches the devices, how one step runs."""

from __future__ import annotations

import abc
import contextlib
from typing import Any

import keras
import tensorflow as tf


class Strategy(abc.ABC):
    """Where and how one step runs.

    A strategy owns the scope in which the model is built, the way a dataset reaches its devices, and one train,
    evaluate and predict step. The loops around the steps are the trainer's, the same for every strategy. The three
    steps are called while a `tf.function` is traced, on one element of the dataset that `distribute` returned.
    """

    num_replicas: int

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Say in one line which devices run what."""

    @abc.abstractmethod
    def distribute(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Turn a dataset of global batches into one whose elements the steps take."""

    @abc.abstractmethod
    def global_batch(self, element: Any) -> Any:
        """Return the global batch behind one element of the dataset that `distribute` returned."""

    @abc.abstractmethod
    def check_scope(self, model: keras.Model) -> None:
        """Refuse a model that was not built in this strategy's scope.

        Raises:
            ValueError: If it was not.
        """

    @abc.abstractmethod
    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Check, before the first step, that this model can be trained here exactly.

        Args:
            model: A built and compiled model.
            batch: The first global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If it cannot; the message names what stands in the way.
        """

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

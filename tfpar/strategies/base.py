"""What a user gives a trainer: where the model trains, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfpar.engines.engine import Engine, Scheduled
from tfpar.engines.preview import Preview
from tfpar.job import Job
from tfpar.layout import Layout
from tfpar.strategies import model_scopes

if TYPE_CHECKING:
    from tfpar.pipeline.analysis.prediction import Prediction
    from tfpar.pipeline.schedule.simulator import Timeline


class Strategy:
    """Decide where a model trains: a layout of devices, and the engine that runs the steps there.

    Args:
        layout: The grid of replicas, stages and shards.
        engine: Runs the steps.

    Example:
        >>> strategy: tfpar.Strategy = tfpar.Mirrored(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas, strategy.num_workers, strategy.is_chief
        (2, 1, True)
    """

    def __init__(self, layout: Layout, engine: Engine) -> None:
        self.layout, self.engine = layout, engine
        if engine.home is not None:
            engine.home.tfpar_strategy = self  # so that `strategy_of` finds this object from a model's variables

    @property
    def job(self) -> Job:
        """The workers that train the model, of which this process is one."""
        return self.engine.job

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.job.num_workers

    @property
    def rank(self) -> int:
        """The number of this worker."""
        return self.job.rank

    @property
    def is_chief(self) -> bool:
        """Whether this process decides for all workers and writes files."""
        return self.job.is_chief

    @property
    def num_replicas(self) -> int:
        """The number of replicas, on all workers together; of a `Hybrid` those of this worker."""
        return self.engine.num_replicas

    @property
    def devices(self) -> Sequence[Any]:
        """The devices of this process, or those of all workers that it uses."""
        return self.engine.devices

    @property
    def device_names(self) -> list[str]:
        """The devices in words; those of other workers with their rank."""
        return self.engine.device_names

    def describe(self) -> str:
        """Return one line with the devices and their roles."""
        return f"{type(self).__name__} of {self.layout.describe(self.layout.labels(self.device_names))}"

    def __repr__(self) -> str:
        """Return the description, which a notebook shows."""
        return f"<{self.describe()}>"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a user builds a model for this strategy; its `fit` is that of a trainer.

        Example:
            >>> with tfpar.Mirrored().scope():
            ...     model = build_model()
            >>> history = model.fit(dataset, epochs=2)
        """
        return model_scopes.scope(self)

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return a preview of a step: a row for each device of this worker, or for each stage.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: The local batch of this worker, `(inputs, targets, sample_weight)` as far as given.
        """
        return self.engine.preview(model, batch, self.describe())

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a scheduled step runs.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: A global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If the strategy has no schedule.
        """
        return self._scheduled().trace(model, batch)

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Measure the stages on a batch and predict a step; no weight changes. All workers must call it.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: A global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If the strategy has no schedule, or the model was not prepared since it was last compiled.

        Example:
            >>> batch = trainer.build(dataset)
            >>> 0 < strategy.predict_step_time(trainer.model, batch).planned.bubble < 1
            True
        """
        return self._scheduled().predict_step_time(model, batch)

    def _scheduled(self) -> Scheduled:
        if self.engine.scheduled is None:
            raise ValueError(f"Only a pipeline has a schedule to trace, and the strategy is {self.describe()}.")
        return self.engine.scheduled

"""The base class of strategies: where and how a model trains."""

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
    """Base class of strategies: a layout of devices and the engine that runs the steps on them.

    Args:
        layout: The grid of replicas, stages and shards.
        engine: The engine that runs the steps.

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
        """The workers that train the model together, including this process."""
        return self.engine.job

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.job.num_workers

    @property
    def rank(self) -> int:
        """Rank of this worker; 0 without other workers."""
        return self.job.rank

    @property
    def is_chief(self) -> bool:
        """Whether this process decides for all workers and writes files."""
        return self.job.is_chief

    @property
    def num_replicas(self) -> int:
        """Number of replicas, on all workers together; for `Hybrid`, those of this worker."""
        return self.engine.num_replicas

    @property
    def devices(self) -> Sequence[Any]:
        """The devices that this process uses; with `across_workers=True`, those of all workers."""
        return self.engine.devices

    @property
    def device_names(self) -> list[str]:
        """Readable names of `devices`; those of other workers include their rank."""
        return self.engine.device_names

    def describe(self) -> str:
        """Return a one-line description of the devices and their roles."""
        return f"{type(self).__name__} of {self.layout.describe(self.layout.labels(self.device_names))}"

    def __repr__(self) -> str:
        """Return the description, for notebooks."""
        return f"<{self.describe()}>"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which to build models for this strategy; their `fit` is that of a trainer.

        Example:
            >>> with tfpar.Mirrored().scope():
            ...     model = build_model()
            >>> history = model.fit(dataset, epochs=2)
        """
        return model_scopes.scope(self)

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return a preview of a step, with a row per device of this worker or per stage.

        Args:
            model: A model prepared by `Trainer.build` or `fit`.
            batch: The local batch of this worker, `(inputs, targets, sample_weight)`; the last two are optional.
        """
        return self.engine.preview(model, batch, self.describe())

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Run a step and measure when each action of its schedule runs; no weight changes.

        Args:
            model: A model prepared by `Trainer.build` or `fit`.
            batch: A global batch, `(inputs, targets, sample_weight)`; the last two are optional.

        Raises:
            ValueError: If the strategy has no schedule.
        """
        return self._scheduled().trace(model, batch)

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Predict the time of a step from measurements of its stages; no weight changes. All workers must call it.

        Args:
            model: A model prepared by `Trainer.build` or `fit`.
            batch: A global batch, `(inputs, targets, sample_weight)`; the last two are optional.

        Raises:
            ValueError: If the strategy has no schedule, or the model was compiled since it was prepared.

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

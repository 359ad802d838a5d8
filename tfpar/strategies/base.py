"""What a user gives a trainer: where the model trains, and how."""

from __future__ import annotations

import contextlib
from typing import Any

from tfpar.layout import Layout
from tfpar.strategies import model_scopes
from tfpar.strategies.engine import Engine


class Strategy(Engine):
    """Decide where a model is built and how one step runs.

    Attributes:
        layout: The grid of replicas, stages and shards.

    Example:
        >>> strategy: tfpar.Strategy = tfpar.Mirrored(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas, strategy.num_workers, strategy.is_chief
        (2, 1, True)
    """

    layout: Layout

    @property
    def engine(self) -> Engine:
        """What runs the steps."""
        return self

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a user builds a model for this strategy; its `fit` is that of a trainer.

        Example:
            >>> with tfpar.Mirrored().scope():
            ...     model = build_model()
            >>> history = model.fit(dataset, epochs=2)
        """
        return model_scopes.scope(self)

    def __repr__(self) -> str:
        """Return the description, which a notebook shows."""
        return f"<{self.describe()}>"

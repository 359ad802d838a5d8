"""The verdict of a study, as plain data: how the values of parts give those of the whole batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from tfpar.reduction.losses_in_call import Way

# A loss has a value for each row, is a mean or a sum over the rows, or is computed on the whole batch.
Kind = Literal["rows", "mean", "sum", "whole"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the losses, metrics and states of parts of a batch give those of the whole batch.

    Args:
        losses: The kind of each loss of `compile`, in Keras' order; empty if all have a value for each row.
        own_loss: The kind of an overridden `compute_loss`; None if it is not overridden.
        added: The kind of each loss that layers add.
        whole_in_call: Whether losses computed in the model's `call` are those of the whole batch.
        ways: What these losses need of the whole batch if parts run one after another.
        metrics: The indices of the metrics of `compile` that take the whole batch.
        whole_metrics: Whether an overridden `compute_metrics` takes the whole batch.
        reads_inputs: Whether a `compute_loss` or `compute_metrics` that takes the whole batch reads the inputs.
        averaged: The indices of the non-trainable weights to average over the parts after each step.
        gathered: The paths of the layers that are called with the whole batch.
    """

    losses: tuple[Kind, ...] = ()
    own_loss: Kind | None = None
    added: tuple[Kind, ...] = ()
    whole_in_call: bool = True
    ways: tuple[Way, ...] = ()
    metrics: tuple[int, ...] = ()
    whole_metrics: bool = False
    reads_inputs: bool = False
    averaged: tuple[int, ...] = ()
    gathered: tuple[str, ...] = ()

    @property
    def takes_whole_loss(self) -> bool:
        """Whether a loss of `compile`, or an overridden `compute_loss`, takes the whole batch."""
        return "whole" in (*self.losses, self.own_loss)

    def merged(self, others: Sequence[Verdict]) -> Verdict:
        """Return the verdict for all workers.

        If any worker computes something on the whole batch, or if workers disagree, all compute it on the whole batch.

        Args:
            others: The verdicts of the other workers.

        Raises:
            ValueError: If the workers disagree on a loss that a layer adds.

        Example:
            >>> Verdict(losses=("mean",)).merged([Verdict(losses=("whole",))]).losses
            ('whole',)
        """
        every = [self, *others]
        if len({verdict.added for verdict in every}) > 1:
            raise ValueError(
                "A loss added with add_loss must be a sum or a mean over the batch on every worker, but the workers "
                "disagree. Make it a mean over the batch, or train on SingleDevice()."
            )
        number = max(len(verdict.losses) for verdict in every)
        losses = [verdict.losses or ("rows",) * number for verdict in every]
        own = {verdict.own_loss for verdict in every}
        return dataclasses.replace(
            self,
            losses=tuple(kinds[0] if len(set(kinds)) == 1 else "whole" for kinds in zip(*losses, strict=True)),
            own_loss=own.pop() if len(own) == 1 else "whole",
            whole_in_call=all(verdict.whole_in_call for verdict in every),
            ways=max((verdict.ways for verdict in every), key=lambda ways: ways.count("whole")),
            metrics=tuple(sorted({number for verdict in every for number in verdict.metrics})),
            whole_metrics=any(verdict.whole_metrics for verdict in every),
            reads_inputs=any(verdict.reads_inputs for verdict in every),
            averaged=tuple(sorted({number for verdict in every for number in verdict.averaged})),
            gathered=next((verdict.gathered for verdict in every if verdict.gathered), ()),
        )

    def to_json(self) -> str:
        """Return the verdict as JSON, for the other workers.

        Example:
            >>> Verdict.of_json(Verdict(losses=("mean",)).to_json()).losses
            ('mean',)
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Verdict:
        """Return the verdict of another worker."""
        values = json.loads(text)
        tuples: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**tuples)

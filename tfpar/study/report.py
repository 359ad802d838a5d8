"""What a study found out about a model, as text for its user."""

from __future__ import annotations

import dataclasses
import textwrap

import keras

from tfpar._compat.models import keras_losses, keras_metrics
from tfpar.reduction.verdict import Kind, Verdict

_COLUMNS = 78
_KINDS: dict[Kind, tuple[str, str]] = {
    "rows": ("a value for each row", "summed, and divided once"),
    "mean": ("a mean over the rows", "averaged by rows"),
    "sum": ("a sum over the rows", "summed"),
    "whole": ("parts do not give it", "on the gathered batch"),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """What `Trainer.study` found out; `print` shows it as a table.

    Attributes:
        title: The model and the strategy.
        rows: What was studied, what was found, and what a step does about it.
        verdict: The same as data; None where one device computes the whole batch, and for a model that is refused.
        refusal: Why the strategy refuses the model, and the ways out; empty if it trains it.

    Example:
        >>> study = trainer.study(dataset)
        >>> print(study)
        >>> study.refusal
        ''
    """

    title: str
    rows: tuple[tuple[str, str, str], ...] = ()
    verdict: Verdict | None = None
    refusal: str = ""

    def __str__(self) -> str:
        """Return the table, in lines of at most 80 columns; or the refusal."""
        title = textwrap.wrap(self.title, _COLUMNS, subsequent_indent="  ")
        if self.refusal:
            return "\n".join([*title, *textwrap.wrap(f"refused: {self.refusal}", _COLUMNS)])
        widths = [max((len(row[column]) for row in self.rows), default=0) for column in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {found:<{widths[1]}}  {done}".rstrip() for name, found, done in self.rows]
        return "\n".join([*title, *lines])


def rows_of(model: keras.Model, verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the rows of the table of a model that trains.

    Args:
        model: A compiled model.
        verdict: What a study found.
    """
    rows = [("layers", "each row alone", "as on one device")]
    rows += [(f"layer {path}", "mixes the rows", "on the gathered batch") for path in verdict.gathered]
    rows += [
        (f"state {model.weights[number].path}", "a mean over the rows", "averaged after each step")
        for number in verdict.averaged
    ]
    if verdict.own_loss is not None:
        rows.append((f"{type(model).__name__}.compute_loss", *_KINDS[verdict.own_loss]))
    else:
        rows += [(f"loss {name}", *_KINDS[kind]) for name, kind in _losses(model, verdict)]
    rows += [(f"added loss {number}", *_KINDS[kind]) for number, kind in enumerate(verdict.added, 1)]
    if verdict.whole_metrics:
        rows.append((f"{type(model).__name__}.compute_metrics", *_KINDS["whole"]))
    for number, metric in enumerate(keras_metrics.compiled_metrics(model)):
        whole = number in verdict.metrics
        found = _KINDS["whole"] if whole else ("states of parts add up", "counted in parts")
        rows.append((f"metric {metric.name}", *found))
    return rows


def gathering(model: keras.Model, verdict: Verdict, who: str, cost: str) -> str:
    """Return one line about what is computed on the gathered batch; empty for nothing.

    Args:
        model: A compiled model.
        verdict: What a study found.
        who: Who computes it.
        cost: A sentence about what that costs; empty for none.
    """
    names = [name for name, _, done in rows_of(model, verdict) if done == _KINDS["whole"][1]]
    if not names:
        return ""
    line = f"Parts of a batch do not give the {' and the '.join(names)} of {model.name!r}: "
    return f"{line}{who} computes it on the gathered batch. {cost}".rstrip()


def _losses(model: keras.Model, verdict: Verdict) -> list[tuple[str, Kind]]:
    """Return the losses of `compile`, each with its kind."""
    losses = keras_losses.flat_losses(model)
    names = [keras_losses.name_of(loss) for loss in losses]
    kinds: list[Kind] = list(verdict.losses) or ["rows" for _ in losses]
    if len(names) != len(kinds):  # one loss for several outputs
        names = names[:1] * len(kinds)
    return list(zip(names, kinds, strict=True))

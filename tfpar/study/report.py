"""The results of a study as text."""

from __future__ import annotations

import dataclasses
import textwrap

import keras

from tfpar._compat.models import keras_losses, keras_metrics
from tfpar._compat.variables import keras_variables
from tfpar.reduction import metric_logs
from tfpar.reduction.own_step import PartsOfStep
from tfpar.reduction.verdict import Kind, Verdict

_COLUMNS = 78
_KINDS: dict[Kind, tuple[str, str]] = {
    "rows": ("a value for each row", "summed, and divided once"),
    "mean": ("a mean over the rows", "averaged by rows"),
    "sum": ("a sum over the rows", "summed"),
    "whole": ("needs the whole batch", "on the gathered batch"),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """The result of `Trainer.study`; `print` shows it as a table.

    Attributes:
        title: The model and the strategy.
        rows: For each layer, loss, metric and state: its name, what was found, and how a step computes it.
        verdict: The same as data; None for a refused model, and if one device computes the whole batch.
        refusal: Why the strategy refuses the model, and the ways out; empty if the strategy can train it.

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
        """Return the table or the refusal as text."""
        title = textwrap.wrap(self.title, _COLUMNS, subsequent_indent="  ")
        if self.refusal:
            return "\n".join([*title, *textwrap.wrap(f"refused: {self.refusal}", _COLUMNS)])
        widths = [max((len(row[column]) for row in self.rows), default=0) for column in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {result:<{widths[1]}}  {how}".rstrip() for name, result, how in self.rows]
        return "\n".join([*title, *lines])


def rows_of(model: keras.Model, verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return the table of a compiled model that the strategy can train."""
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
        is_whole = number in verdict.metrics
        cells = _KINDS["whole"] if is_whole else ("states of parts add up", "counted in parts")
        rows.append((f"metric {metric.name}", *cells))
    return rows


def own_step_rows(model: keras.Model, parts: PartsOfStep) -> list[tuple[str, str, str]]:
    """Return the table of a train step of the model's own that replicas can run."""
    state = keras_variables.state(model)
    counted = {id(variable) for metric in metric_logs.all_metrics(model) for variable in metric.variables}
    relations = [
        (f"update {number}: gradients", relation)
        for number, gradients in enumerate(parts.updates, 1)
        for relation in sorted({relation for relation in gradients if relation is not None})
    ]
    relations += [
        (f"state {state[number].path}", relation)
        for number, relation in parts.states
        if id(state[number]) not in counted
    ]
    relations += [(f"log {name}", relation) for name, relation in parts.logs]
    rows = [(name, *_KINDS["sum" if relation == "sum" else "mean"]) for name, relation in relations]
    return [*rows, ("metrics, other states", "as in each part", "as on one device")]


def gathering(model: keras.Model, verdict: Verdict, who: str, cost: str) -> str:
    """Return one line about what is computed on the gathered batch; empty if nothing is.

    Args:
        model: A compiled model.
        verdict: The verdict of its study.
        who: Which device computes it.
        cost: A sentence about the cost; may be empty.
    """
    names = [name for name, _, how in rows_of(model, verdict) if how == _KINDS["whole"][1]]
    if not names:
        return ""
    line = f"The {' and the '.join(names)} of {model.name!r} {'needs' if len(names) == 1 else 'need'} the whole batch: "
    return f"{line}{who} computes it on the gathered batch. {cost}".rstrip()


def _losses(model: keras.Model, verdict: Verdict) -> list[tuple[str, Kind]]:
    """Return the name and kind of each loss of `compile`."""
    losses = keras_losses.flat_losses(model)
    names = [keras_losses.name_of(loss) for loss in losses]
    kinds: list[Kind] = list(verdict.losses) or ["rows" for _ in losses]
    if len(names) != len(kinds):  # one loss for several outputs
        names = names[:1] * len(kinds)
    return list(zip(names, kinds, strict=True))

"""The study of a model's own step: run on some rows as a whole and in parts, do all variables change alike?

    whole  rows 0 1 2 3 4   gradients g ──► update ──► gradients h ──► update ──► changes of variables, logs
    part   rows 0 1         gradients a     update     gradients b     update     with g and h, the gradients of the
    part   rows 2 3 4       gradients c     update     gradients d     update     whole: as replicas, which sum theirs

Every run has memory of its own and typical random numbers, so that no variable of the model changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat.graphs import tf_function, tf_tapes
from tfpar._compat.models import keras_losses, keras_metrics, keras_model
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.optimizers.keras_optimizer import one_device_optimizer
from tfpar._compat.random_numbers import fixed_random_ops, random_state
from tfpar._compat.variables import keras_sandbox, keras_variables
from tfpar.reduction import metric_logs, own_step
from tfpar.reduction.own_step import METHODS, OwnStep, PartsOfStep, Relation
from tfpar.reduction.whole_batch import Recording
from tfpar.study import relation
from tfpar.study.observation import moving_statistics
from tfpar.study.rows import SIZES, Part, few_rows, parts_of
from tfpar.study.study import spread_weights

_WAYS_OUT = (
    "Take what compares examples from tfpar.gather, write the step as tfpar.Objective, train on SingleDevice(), or let "
    'every replica run it alone with own_steps="average", which gives other weights.'
)


@dataclasses.dataclass
class _Run:
    """What one run of a step shows.

    Attributes:
        updates: The optimizer, the gradients and the variables of each update.
        changes: How each variable of the state changes; None for one without numbers.
        losses: What gradients were computed of, in the order of the step.
        gathers: Whether the step takes rows of the whole batch.
        logs: The values of log entries that are no results of metrics.
        results: The metric of each other log entry.
        outputs: What a predict step returns.
    """

    updates: list[tuple[Any, list[Any], list[Any]]] = dataclasses.field(default_factory=list)
    changes: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    losses: list[np.ndarray] = dataclasses.field(default_factory=list)
    gathers: bool = False
    logs: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    results: dict[str, keras.Metric] = dataclasses.field(default_factory=dict)
    outputs: Any = None


def rehearse(model: keras.Model, kind: str, batch: Any) -> OwnStep:
    """Run a model's own step once, so that its layers and metrics exist; no variable changes.

    Args:
        model: A compiled model; called outside of the scope of its strategy, into which new variables move later.
        kind: "train", "evaluate" or "predict".
        batch: Its first batch.
    """
    rows = data.take_rows(batch, 0, min(4, int(data.num_rows(batch))))
    known = {id(variable) for variable in keras_variables.state(model)}
    run = _run(model, kind, rows, applies=False)
    if len(keras_variables.state(model)) > len(known):
        for metric in metric_logs.all_metrics(model):  # one that the run has created counted its examples
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()
        run = _run(model, kind, rows, applies=False)  # the results of these metrics are log entries
    return OwnStep(_merged(run.updates), run.results, run.logs, keras_model.compilation(model))


def study_step(model: keras.Model, kind: str, batch: Any) -> PartsOfStep:
    """Find out how replicas give what a model's own step computes on the whole batch, or refuse the step.

    Args:
        model: A model after `rehearse`, with built optimizers.
        kind: "train", "evaluate" or "predict".
        batch: Its first batch.

    Raises:
        ValueError: If the parts of a batch do not give the gradients, variables and logs of the whole batch.
    """
    rows, state = few_rows(batch), keras_variables.state(model)
    runs = [_whole_and_parts(model, kind, rows, state, values) for values in _variations(model, state)]
    if kind == "predict":
        _check_outputs(model, runs)
    compared = [_Compared(model, kind, state, *run) for run in runs]
    return PartsOfStep(
        tuple(
            tuple(_common(relations) for relations in zip(*gradients, strict=True))
            for gradients in zip(*(each.updates() for each in compared), strict=True)
        ),
        tuple((number, kept) for number, kept in _kept(model, compared, state) if kept != "equal"),
        tuple(_logs(compared)),
    )


def averaged_step(model: keras.Model, kind: str, batch: Any) -> PartsOfStep:
    """Take the mean of all that a model's own step computes on replicas, whatever it is on the whole batch.

    Args:
        model: As for `study_step`.
        kind: As for `study_step`.
        batch: As for `study_step`.
    """
    state = keras_variables.state(model)
    run = _run(model, kind, few_rows(batch), state=state)
    updated = [variable for _, _, variables in run.updates for variable in variables]
    slots = [slot for optimizer in keras_variables.optimizers(model) for slot in optimizer.variables]
    counted = [variable for metric in metric_logs.all_metrics(model) for variable in metric.variables]
    others = set(map(id, [*updated, *slots, *counted]))
    averaged = [
        number
        for number, (variable, change) in enumerate(zip(state, run.changes, strict=True))
        if id(variable) not in others and change is not None and change.dtype.kind == "f" and change.any()
    ]
    return PartsOfStep((), tuple((number, "mean") for number in averaged), tuple((name, "mean") for name in run.logs))


def _variations(model: keras.Model, state: Sequence[Any]) -> Iterator[dict[int, tf.Tensor]]:
    """Yield values of variables by number: the present ones, and other weights, where fewer losses look like means."""
    yield {}
    if not keras_model.computes_in_half(model):
        values = {id(model.weights[number]): value for number, value in spread_weights(model).items()}
        yield {number: values[id(variable)] for number, variable in enumerate(state) if id(variable) in values}


def _whole_and_parts(
    model: keras.Model, kind: str, rows: Any, state: Sequence[Any], values: Mapping[int, tf.Tensor]
) -> tuple[_Run, list[_Run]]:
    recording, divisors = Recording(replays_losses=False), list[tf.Tensor]()

    def noted(weight: tf.Tensor) -> tf.Tensor:
        divisors.append(weight)
        return weight

    def masked(*loss: Any) -> Any:
        return own_step.masked_loss(loss, noted, 1.0)

    with recording.recording(sum(SIZES)), keras_losses.masked_losses(masked):
        whole = _run(model, kind, rows, state=state, values=values)
    whole.gathers = recording.gathered
    gradients = [gradients for _, gradients, _ in whole.updates]
    parts = []
    for part in parts_of(rows):
        with recording.replaying(part.start), keras_losses.masked_losses(_masked_in_part(divisors, part)):
            parts.append(_run(model, kind, part.rows, state=state, values=values, replayed=gradients))
    return whole, parts


def _masked_in_part(divisors: Sequence[tf.Tensor], part: Part) -> Callable[..., Any]:
    remaining = iter(divisors)
    return lambda *loss: own_step.masked_loss(loss, lambda _: next(remaining), part.size / sum(SIZES))


@random_state.preserved_random_state()
def _run(
    model: keras.Model,
    kind: str,
    rows: Any,
    *,
    state: Sequence[Any] | None = None,
    values: Mapping[int, tf.Tensor] | None = None,
    replayed: Sequence[Sequence[Any]] | None = None,
    applies: bool = True,
) -> _Run:
    """Run a step eagerly on some rows.

    Args:
        model: The model.
        kind: Of the step.
        rows: Its batch.
        state: The variables of the model; None for the present ones.
        values: Values of variables, by number, in place of the present ones.
        replayed: The gradients with which to update in place of the run's own.
        applies: Whether optimizers update variables.
    """
    run, state = _Run(), keras_variables.state(model) if state is None else state

    def update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        run.updates.append((optimizer, dense, variables))
        if applies:
            number = len(run.updates) - 1
            with keras_own_updates.applying(), one_device_optimizer():
                optimizer.apply(dense if replayed is None else list(replayed[number]), variables)

    random_state.seeded([], 0)
    with contextlib.ExitStack() as stack:
        memories = stack.enter_context(keras_sandbox.sandboxed(model, state, values))
        before = [memory.read_value() for memory in memories]
        results = stack.enter_context(metric_logs.results_noted(model))
        for context in (
            keras_own_updates.updates_through(update),
            tf_tapes.losses_noted(lambda loss: run.losses.append(loss.numpy())),
            keras_losses.local_losses(),
            moving_statistics(training=kind == "train"),
            tf_function.own_traces(),
            fixed_random_ops.fixed(),
        ):
            stack.enter_context(context)
        returned = own_step.call(model, kind, rows)
        run.changes = [_change(old, memory) for old, memory in zip(before, memories, strict=True)]
    if kind == "predict":
        run.outputs = returned
        return run
    for name, value in own_step.flat_logs(returned).items():
        metric = results.get(id(value))
        if metric is None:
            run.logs[name] = tf.convert_to_tensor(value)
        else:
            run.results[name] = metric[1]
    return run


def _change(old: tf.Tensor, memory: tf.Variable) -> np.ndarray | None:
    if not (old.dtype.is_floating or old.dtype.is_integer):
        return None
    return np.asarray(memory.read_value().numpy() - old.numpy())


def _merged(updates: Sequence[tuple[Any, list[Any], list[Any]]]) -> list[tuple[Any, list[keras.Variable]]]:
    """Return each optimizer once, with all variables that it updates."""
    merged: dict[int, tuple[Any, dict[int, Any]]] = {}
    for optimizer, _, variables in updates:
        _, known = merged.setdefault(id(optimizer), (optimizer, {}))
        known.update({id(variable): variable for variable in variables})
    return [(optimizer, list(variables.values())) for optimizer, variables in merged.values()]


class _Compared:
    """The comparison of a run on a batch with the runs on its parts."""

    def __init__(self, model: keras.Model, kind: str, state: Sequence[Any], whole: _Run, parts: Sequence[_Run]) -> None:
        self._model, self._kind, self._state, self._whole, self._parts = model, kind, state, whole, parts
        self._in_half = keras_model.computes_in_half(model)
        self._largest = 0.0  # of the gradients of an update
        self._name = f"{type(model).__name__}.{METHODS[kind]}"
        if any(len(part.updates) != len(whole.updates) for part in parts):
            raise ValueError(
                f"A step must update alike for every batch to run on replicas, and {self._name} updates "
                f"{len(whole.updates)} times for {sum(SIZES)} examples and {[len(part.updates) for part in parts]} "
                f"times for parts of them. {_WAYS_OUT}"
            )

    def updates(self) -> list[list[relation.Relations | None]]:
        """Return the relations of each gradient of each update; None for no gradient.

        The gradients of gathered rows are sums over the losses of all parts, which no part has alone. So where a step
        gathers, the losses are compared.
        """
        if self._whole.gathers:
            return self._of_gathered()
        found = []
        for number, (_, gradients, variables) in enumerate(self._whole.updates):
            parts = [part.updates[number][1] for part in self._parts]
            self._largest = _largest([*gradients, *(gradient for part in parts for gradient in part)])
            columns = zip(variables, gradients, *parts, strict=True)
            found.append([self._gradient(number, variable, *values) for variable, *values in columns])
        return found

    def _of_gathered(self) -> list[list[relation.Relations | None]]:
        for number, whole in enumerate(self._whole.losses):
            parts = [part.losses[number] for part in self._parts]
            if "mean" not in self._relations(whole, parts):
                self._refuse("a loss of gathered rows", whole, parts, "Take the mean over the examples. " + _WAYS_OUT)
        mean: relation.Relations = frozenset({"mean"})
        return [
            [None if gradient is None else mean for gradient in gradients] for _, gradients, _ in self._whole.updates
        ]

    def _gradient(self, number: int, variable: Any, whole: Any, *parts: Any) -> relation.Relations | None:
        if whole is None:
            return None
        values = [np.zeros(whole.shape) if part is None else part.numpy() for part in parts]
        if _largest([whole, *parts]) <= 1e3 * np.finfo(whole.dtype.as_numpy_dtype).eps * self._largest:
            return relation.ANY  # a sum that cancels, of which rounding remains
        relations = self._relations(whole.numpy(), values) & {"mean", "sum"}
        if not relations:
            count = f" of update {number + 1}" if len(self._whole.updates) > 1 else ""
            self._refuse(f"the gradient of {variable.path!r}{count}", whole.numpy(), values)
        return relations

    def states(self) -> list[relation.Relations]:
        """Return the relations of the change of each variable."""
        found = []
        for number, variable in enumerate(self._state):
            whole = self._whole.changes[number]
            parts = [change for part in self._parts if (change := part.changes[number]) is not None]
            if whole is None:
                found.append(relation.ANY)
                continue
            relations = self._relations(whole, parts) & {"equal", "mean", "sum"}
            if not relations:
                self._refuse(f"the change of {variable.path!r}", whole, parts)
            found.append(relations)
        return found

    def logs(self) -> dict[str, relation.Relations]:
        """Return the relations of each log entry that is no result of a metric."""
        found = {}
        for name, value in self._whole.logs.items():
            if any(name not in part.logs for part in self._parts):
                raise ValueError(f"{self._name} must return the same log entries for every batch: {name!r} is missing.")
            parts = [part.logs[name].numpy() for part in self._parts]
            found[name] = self._relations(value.numpy(), parts) & {"equal", "mean", "sum"}
            if not found[name]:
                advice = "Count it in a keras.metrics.Mean, and return its result."
                self._refuse(f"the log entry {name!r}", value.numpy(), parts, advice)
        return found

    def _relations(self, whole: np.ndarray, parts: Sequence[np.ndarray]) -> relation.Relations:
        """Return the relations of values, with the precision in which the model computes them."""
        if self._in_half and whole.dtype.kind == "f":
            largest = (
                max((float(np.max(np.abs(values), initial=0.0)) for values in (whole, *parts)), default=0.0) or 1.0
            )
            whole, *parts = ((values / largest).astype(np.float16) for values in (whole, *parts))
        return relation.relations(whole, parts, SIZES)

    def _refuse(self, what: str, whole: np.ndarray, parts: Sequence[np.ndarray], advice: str = _WAYS_OUT) -> NoReturn:
        mean = np.average(np.stack(parts), axis=0, weights=SIZES) if _are_alike(whole, parts) else None
        difference = "" if mean is None else f": their mean differs by up to {np.max(np.abs(mean - whole)):.3g}"
        size = float(np.max(np.abs(whole), initial=0.0))
        raise ValueError(
            f"What a step changes must be a mean or a sum over examples to run on replicas, and {what} in {self._name} "
            f"is neither for two parts of a batch{difference}, where it is up to {size:.3g}. {advice}"
        )


def _largest(gradients: Sequence[Any]) -> float:
    present = [gradient for gradient in gradients if gradient is not None]
    return max((float(tf.reduce_max(tf.abs(gradient))) for gradient in present if tf.size(gradient)), default=0.0)


def _are_alike(whole: np.ndarray, parts: Sequence[np.ndarray]) -> bool:
    return all(part.shape == whole.shape for part in parts)


def _common(relations: Sequence[relation.Relations | None]) -> Relation | None:
    known = [each for each in relations if each is not None]
    common = relation.common_relations(known)
    if not known:
        return None
    return "mean" if "mean" in common else "sum"


def _kept(model: keras.Model, compared: Sequence[_Compared], state: Sequence[Any]) -> Iterator[tuple[int, Relation]]:
    """Yield the relation of each variable, the simplest that holds in all runs.

    A metric adds up on replicas, so that equal parts are a mean there. Its variables have one relation where they can:
    some may be zero in the rows of the study.
    """
    found = {
        id(variable): relation.common_relations(relations)
        for variable, *relations in zip(state, *(each.states() for each in compared), strict=True)
    }
    metrics = set()
    for metric in metric_logs.all_metrics(model):
        variables = [variable for variable in metric.variables if id(variable) in found]
        of_metric = relation.common_relations(found[id(variable)] for variable in variables)
        if of_metric and not keras_metrics.inner_metrics(metric):
            found |= {id(variable): of_metric for variable in variables}
        metrics |= set(map(id, variables))
    for number, variable in enumerate(state):
        simplest: tuple[Relation, ...] = ("sum", "mean") if id(variable) in metrics else ("equal", "mean", "sum")
        yield number, next((kept for kept in simplest if kept in found[id(variable)]), "mean")


def _logs(compared: Sequence[_Compared]) -> Iterator[tuple[str, Relation]]:
    every = [each.logs() for each in compared]
    for name in every[0]:
        common = relation.common_relations([logs[name] for logs in every if name in logs])
        yield name, "sum" if common == {"sum"} else "mean"


def _check_outputs(model: keras.Model, runs: Sequence[tuple[_Run, list[_Run]]]) -> None:
    for whole, parts in runs:
        flat = [tf.nest.flatten(run.outputs) for run in (whole, *parts)]
        for value, *of_parts in zip(*flat, strict=True):
            if not relation.is_joined(np.asarray(value), [np.asarray(part) for part in of_parts]):
                raise ValueError(
                    f"A predict step must return one row for each example to run on replicas, and the rows of "
                    f"{type(model).__name__}.predict_step for parts of a batch are not those for all of it. Predict on "
                    "SingleDevice()."
                )

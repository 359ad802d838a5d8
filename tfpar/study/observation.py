"""Run a model eagerly on a few rows and record what it does; no weight, state or random state changes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_model
from tfpar._compat.models.keras_calls import Calls, LayerCall
from tfpar._compat.random_numbers import fixed_random_ops, python_random, random_state
from tfpar._compat.variables import keras_variables, tf_untracked


class CallError(Exception):
    """An error of a model on the rows of a study.

    Args:
        path: The path of the innermost layer that raised the error.
        error: The error.
    """

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(path, error)
        self.path, self.error = path, error


class Mode(NamedTuple):
    """How a model runs in the steps that a study is for.

    Args:
        training: Whether it trains.
        gathers: Whether synchronized BatchNormalization has the statistics of the whole batch, as on replicas.
    """

    training: bool
    gathers: bool = True


@dataclasses.dataclass
class Observation:
    """The record of one run of a model.

    Attributes:
        outputs: The outputs of the model.
        added: The sum of each loss that layers add.
        counted: The scalars that layers count in metrics, each with its metric.
        states: The new values of non-trainable weights, by index in `model.weights`.
        untracked: Variables that the model changes and Keras does not track: name to path of the layer.
        python_draws: The paths of layers that use random numbers of NumPy or Python.
        calls: The calls of layers, in the order in which they return; empty unless asked for.
        random_functions: The names of the random functions whose numbers were replaced.
    """

    outputs: Any = None
    added: list[tf.Tensor] = dataclasses.field(default_factory=list)
    counted: list[tuple[keras.Metric, tf.Tensor]] = dataclasses.field(default_factory=list)
    states: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    untracked: dict[str, str] = dataclasses.field(default_factory=dict)
    python_draws: list[str] = dataclasses.field(default_factory=list)
    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    random_functions: set[str] = dataclasses.field(default_factory=set)


@random_state.preserved_random_state()
def observe(
    model: keras.Model,
    inputs: Any,
    mode: Mode,
    *,
    seed: int = 0,
    is_random: bool = False,
    states: Mapping[int, tf.Tensor] | None = None,
    keeps_calls: bool = False,
) -> Observation:
    """Run a model eagerly on some rows.

    Typical values replace random numbers, so that runs on a batch and on its parts can be compared. In training,
    BatchNormalization uses its moving statistics, because batch statistics differ between parts by design.

    Args:
        model: A built model.
        inputs: Rows of its inputs.
        mode: How it runs.
        seed: Seed of the random numbers that typical values do not replace.
        is_random: Whether to keep random numbers.
        states: Values of weights before the run, by index in `model.weights`; None for the current ones.
        keeps_calls: Whether to record the calls of layers.

    Raises:
        CallError: If the model raises an error.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.ReLU()])
        >>> observe(model, tf.constant([[-1.0, 2.0]]), Mode(training=False)).outputs.numpy().tolist()
        [[0.0, 2.0]]
    """
    seen, calls, weights = Observation(), Calls(model, keeps_calls), model.weights
    layers = [model, *keras_model.all_layers(model)]
    values = random_state.seeded(_random_states(model), seed)
    values += [(weights[number], value) for number, value in (states or {}).items()]
    scope = _Changes(values, calls, reads=keras_variables.are_apart(weights))
    with (
        scope,
        _noting(seen, calls, mode),
        python_random.noted(layers, lambda: calls.path) as seen.python_draws,
        _draws(is_random, scope.note) as seen.random_functions,
    ):
        try:
            seen.outputs = keras_model.call_model(model, inputs, mode.training)
        except Exception as error:
            raise CallError(calls.failed or model.name, error) from error
    paths = {state.path: path for state, path in scope.changed.values()}
    seen.untracked |= {path: paths[path] for path in _untracked(model, [state for state, _ in scope.changed.values()])}
    seen.calls = calls.ended
    new = {number: scope.assigned(weight) for number, weight in enumerate(weights) if not weight.trainable}
    seen.states = {number: tf.convert_to_tensor(value) for number, value in new.items() if value is not None}
    return seen


class _Changes(keras_variables.PenalizedScope):
    """A scope that records which variables are assigned, and by which layer.

    Args:
        values: Variables and their values.
        calls: The calls of layers.
        reads: Whether to copy weights of other devices here, as XLA needs, which compiles grouped convolutions on CPUs.
    """

    def __init__(self, values: list[tuple[Any, Any]], calls: Calls, *, reads: bool = False) -> None:
        super().__init__(values)
        self._calls, self._reads = calls, reads
        self.changed: dict[int, tuple[Any, str]] = {}

    def assigned(self, variable: Any) -> Any:
        """Return the value assigned in this scope, or None."""
        return keras.StatelessScope.get_current_value(self, variable)

    def get_current_value(self, variable: Any) -> Any:
        """Return the value for a layer or regularizer; None to read the variable itself."""
        reads = self._reads and self.assigned(variable) is None and keras_variables.is_allocated(variable)
        return keras_variables.read_here(variable) if reads else super().get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Record the variable of an update."""
        super().add_update(update)
        self._note(update[0])

    def note(self, generator: keras.random.SeedGenerator) -> None:
        """Record the state of a generator that draws random numbers."""
        self._note(generator.state)

    def _note(self, variable: Any) -> None:
        self.changed.setdefault(id(variable), (variable, self._calls.path))


def _random_states(model: keras.Model) -> list[Any]:
    return [random_state.state_of_no_layer(), *fixed_random_ops.seed_states(keras_model.all_layers(model))]


def _draws(is_random: bool, note_generator: Callable[[Any], None]) -> contextlib.AbstractContextManager[set[str]]:
    return contextlib.nullcontext(set()) if is_random else fixed_random_ops.fixed(note_generator)


@contextlib.contextmanager
def _noting(seen: Observation, calls: Calls, mode: Mode) -> Iterator[None]:
    """Record what a run of the model does, apart from its results."""
    added: list[Any] = []

    def note_scalar(metric: keras.Metric, value: tf.Tensor) -> None:
        seen.counted.append((metric, value))

    def note_variable(name: str) -> None:
        seen.untracked.setdefault(name, calls.path)

    with (
        calls.noted(),
        keras_losses.collect_added_losses(lambda: added),
        keras_losses_in_call.scalars_noted(note_scalar),
        tf_untracked.assignments_noted(note_variable),
        tf_function.own_traces(),
        moving_statistics(training=mode.training, gathers=mode.gathers),
    ):
        yield
    seen.added = [tf.reduce_sum(loss) for loss in added]


@contextlib.contextmanager
def moving_statistics(*, training: bool, gathers: bool = True) -> Iterator[None]:
    """Use the moving statistics of BatchNormalization in training, or wherever it has the whole batch."""
    call, in_training = keras.layers.BatchNormalization.call, training

    def normalize(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        has_all_rows = in_training or (gathers and layer.synchronized)
        return call(layer, inputs, training=training and not has_all_rows, mask=mask)

    with mock.patch.object(keras.layers.BatchNormalization, "call", normalize):
        yield


@contextlib.contextmanager
def undisturbed(model: keras.Model, name: str) -> Iterator[Observation]:
    """Compute losses or metrics in this context as `observe` runs layers; the yielded record is complete afterwards.

    Args:
        model: The model.
        name: The name under which changes of variables are recorded.
    """
    seen, calls = Observation(), Calls(model)
    scope = _Changes([], calls)
    with (
        random_state.preserved_random_state(),
        scope,
        tf_function.own_traces(),
        tf_untracked.assignments_noted(lambda variable: seen.untracked.update({variable: name})),
        python_random.noted([], lambda: name) as drawing,
        fixed_random_ops.fixed(scope.note),
    ):
        random_state.seeded([], 0)
        yield seen
    changed = [state for state, _ in scope.changed.values()]
    seen.untracked |= dict.fromkeys(_untracked(model, changed), name)
    seen.python_draws = drawing


def _untracked(model: keras.Model, variables: list[Any]) -> list[str]:
    """Return the paths of variables that Keras does not track."""
    known = {id(variable) for variable in (*keras_variables.state(model), *random_state.states_of_no_layer())}
    return [variable.path for variable in variables if id(variable) not in known]

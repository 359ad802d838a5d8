"""The memory of Keras variables: which strategy owns it, and how it is replaced without replacing the Keras object.

Written for Keras 3.15 and TensorFlow 2.21. A `keras.Variable` stores a `tf.Variable` in `_value`
(keras/src/backend/tensorflow/core.py). References of users to the Keras object stay valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from tfpar._compat import tf_distribute, versions
from tfpar._compat.variables import keras_weight_keys, sharded_memory, tf_variable_names


def state(model: keras.Model) -> list[Any]:
    """Return all variables of a model's training, without duplicates: weights, random state, optimizer, metrics.

    `Layer.variables` omits the metrics of layers. `model.metrics` contains the compiled metrics once they are built;
    before that, Keras 3.15 stores the arguments of `compile` in `_compile_metrics`.
    """
    held = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    compiled = versions.private(model, "_compile_metrics")
    if compiled is not None:
        user_metrics = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
        held += [metric for metric in user_metrics if isinstance(metric, keras.Metric)]
    groups = [model.variables, *(owner.variables for owner in (*model.metrics, *held, *optimizers(model)))]
    return list({id(variable): variable for group in groups for variable in group}.values())


class PenalizedScope(keras.StatelessScope):
    """A stateless scope in which regularizers read the weights themselves, so that penalties have gradients.

    Keras 3.15 passes the scope's value of a weight to its regularizer, None if there is none
    (`_get_regularization_losses` in keras/src/layers/layer.py).
    """

    def get_current_value(self, variable: Any) -> Any:
        """Return the value assigned inside the scope; for a regularized weight without one, its memory."""
        value = super().get_current_value(variable)
        return variable._value if value is None and variable.regularizer is not None else value


class AssignmentScope(keras.StatelessScope):
    """A stateless scope that records which variables are assigned.

    Args:
        mapping: Pairs of a variable and its value.

    Attributes:
        assigned: Assigned variables by `id`, each with the name scope of its first assignment: a layer or a loss.
    """

    def __init__(self, mapping: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(mapping)
        self.assigned: dict[int, tuple[Any, str]] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Record the variable of an update."""
        super().add_update(update)
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        self.assigned.setdefault(id(update[0]), (update[0], scope))


def optimizer_of(model: keras.Model) -> Any:
    """Return the optimizer of a model, or None if it is not compiled with one (Keras 3.15)."""
    return getattr(model, "optimizer", None)


def optimizers(model: keras.Model) -> list[Any]:
    """Return the optimizers of a model, including wrapped ones; a model with objectives may have several."""
    found = [
        optimizer
        for value in vars(model).values()
        for optimizer in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
        if isinstance(optimizer, keras.Optimizer)
    ]
    return found + [innermost(optimizer) for optimizer in found if innermost(optimizer) is not optimizer]


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that a `LossScaleOptimizer` or another wrapper wraps, or the optimizer itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return getattr(optimizer, "inner_optimizer", optimizer)  # a custom optimizer may be a wrapper too


def home_of(variable: Any) -> tf.distribute.Strategy | None:
    """Return the `tf.distribute` strategy that owns the memory of a variable, or None."""
    return _home_of_memory(variable._value)


def _home_of_memory(memory: Any) -> tf.distribute.Strategy | None:
    return memory._distribute_strategy if isinstance(memory, DistributedVariable) else None


def re_create(variable: Any, value: Any = None) -> None:
    """Replace the memory of a variable, in the current scope and on the current device.

    Args:
        variable: A Keras variable, allocated or not.
        value: Its new value. None runs the deferred initializer.
    """
    keras_weight_keys.note_key(variable)
    with tf_variable_names.scope_of(variable), _watched_as_before(variable):
        if value is None:
            variable._initialize_with_initializer(variable._initializer)
            variable._initializer = None
        else:
            variable._initialize(value)
    variable._tfpar_moves = getattr(variable, "_tfpar_moves", 0) + 1


def note_watched(variable: Any) -> None:
    """Record for `re_create` whether tapes should watch a variable that is allocated later."""
    variable._tfpar_watched = variable._trainable


@contextlib.contextmanager
def _watched_as_before(variable: Any) -> Iterator[None]:
    """Let tapes watch the new memory of a variable exactly if they watched the old one.

    Keras 3.15 copies `trainable` to the memory only when the weight is created. A weight that is frozen later must have
    a gradient again when it is unfrozen.
    """
    trainable, memory = variable._trainable, variable._value
    watched = getattr(variable, "_tfpar_watched", trainable) if memory is None else getattr(memory, "trainable", True)
    variable._trainable = bool(watched)
    try:
        yield
    finally:
        variable._trainable = trainable


def num_moves(variables: Iterable[Any]) -> int:
    """Return how often the memory of some variables was replaced; each time invalidates earlier traces."""
    return sum(getattr(variable, "_tfpar_moves", 0) for variable in variables)


def is_allocated(variable: Any) -> bool:
    """Return whether a variable has memory. A pipeline allocates weights when their stages are known."""
    return variable._value is not None


def is_on(variable: Any, device: str) -> bool:
    """Return whether the memory of a variable is on a device, such as `"GPU:1"` or a full name."""
    of_memory = None if sharded_memory.is_sharded(variable) else getattr(variable._value, "device", None)
    return of_memory is not None and full_name(of_memory) == full_name(device)


def are_apart(variables: Iterable[Any]) -> bool:
    """Return whether variables are on different devices."""
    return len({variable._value.device for variable in variables if variable._value is not None}) > 1


def read_here(variable: Any) -> tf.Tensor:
    """Return the value of a variable on the current device, whichever device holds it."""
    with tf.init_scope(), tf.device(variable._value.device):  # Keras compiles grouped convolutions
        value = variable._value.read_value()
    return tf.identity(value)


def full_name(device: str) -> str:
    """Return the full name of a device. A short name means a device of this process."""
    spec = tf.DeviceSpec.from_string(device if "/" in device else f"/device:{device}")
    own = tf.DeviceSpec.from_string(tf_distribute.own_task())
    return str(own.make_merged_spec(spec).to_string())


def belongs_to(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy in whose scope a model was built, or the one that owns its weights.

    Keras records the scope in `_distribute_strategy`, which is None for a model that was assembled outside the scope
    from layers of another model.
    """
    noted: tf.distribute.Strategy | None = model._distribute_strategy
    return noted or next(filter(None, map(home_of, model.variables)), None)


def move_trainer(model: keras.Model, home: tf.distribute.Strategy | None) -> None:
    """Set the strategy of a moved model and its optimizers for Keras' own methods.

    An optimizer stores the strategy in whose scope it was created, and finds slots by the memory of their weight
    (keras/src/backend/tensorflow/optimizer.py).

    Args:
        model: A model whose variables have been moved.
        home: Their strategy, or None.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            versions.replace(layer, "_distribute_strategy", home)
    forget_functions(model)
    for optimizer in optimizers(model):
        versions.replace(optimizer, "_distribution_strategy", home or tf.distribute.get_strategy())
        find_slots(optimizer)


def has_lost_slots(model: keras.Model) -> bool:
    """Return whether an optimizer can no longer find its slots, because weights have new memory."""
    return any(
        optimizer._var_key(weight) not in optimizer._trainable_variables_indices
        for optimizer in optimizers(model)
        for weight in optimizer._trainable_variables
    )


def find_slots(optimizer: Any) -> None:
    """Update the map of a Keras 3.15 optimizer from the memory of its weights to their slots."""
    indices = {optimizer._var_key(weight): index for index, weight in enumerate(optimizer._trainable_variables)}
    versions.replace(optimizer, "_trainable_variables_indices", indices)


def forget_functions(model: keras.Model) -> None:
    """Drop the functions that Keras' own `fit`, `evaluate` and `predict` traced on old memory."""
    for name in ("train_function", "test_function", "predict_function"):
        versions.replace(model, name, None)


def bare_variables(model: keras.Model, home: tf.distribute.Strategy | None) -> list[tuple[keras.Layer, Any]]:
    """Return the `tf.Variable` attributes of layers that do not belong to the strategy `home`, with their layers.

    Keras does not track them.
    """
    return [
        (layer, value)
        for layer in model._flatten_layers()
        for attribute in vars(layer).values()
        for value in (attribute if isinstance(attribute, list | tuple) else [attribute])
        if isinstance(value, tf.Variable) and _home_of_memory(value) is not home
    ]


def convert_replicated_variables() -> None:
    """Make `float(optimizer.learning_rate)` and `int(iterations)` work for replicated variables.

    In TensorFlow 2.21 a `DistributedVariable` has `numpy`, but lacks `__float__`, `__int__` and `__array__`
    (tensorflow/python/distribute/values.py), which Keras 3.15 calls (keras/src/backend/common/variables.py).
    """
    methods = {
        "__float__": lambda variable: float(variable.numpy()),
        "__int__": lambda variable: int(variable.numpy()),
        "__array__": lambda variable, dtype=None, copy=None: np.array(variable.numpy(), dtype),
    }
    for name, method in methods.items():
        setattr(DistributedVariable, name, method)

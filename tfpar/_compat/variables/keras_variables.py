"""Memory of Keras variables: the strategy that owns it, and its re-creation elsewhere under the same Keras object.

Written for Keras 3.15 and TensorFlow 2.21. A `keras.Variable` has a `tf.Variable` in `_value`
(keras/src/backend/tensorflow/core.py). Users refer to the Keras object of a weight, an optimizer or a metric, which
stays valid when its memory is replaced.
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
    """Return all Keras variables of a model's training, each once: weights, random state, optimizer, metrics.

    `Layer.variables` leaves out the variables of metrics that layers hold. The metrics of a compilation are in
    `model.metrics` once they are built; before that, Keras 3.15 has the arguments of `compile` in `_compile_metrics`.
    """
    held = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    compiled = versions.private(model, "_compile_metrics")
    if compiled is not None:
        given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
        held += [metric for metric in given if isinstance(metric, keras.Metric)]
    groups = [model.variables, *(one.variables for one in (*model.metrics, *held, *optimizers(model)))]
    return list({id(variable): variable for group in groups for variable in group}.values())


class PenalizedScope(keras.StatelessScope):
    """A stateless scope without values, in which regularizers read the weights, so that their gradients are computed.

    Keras 3.15 passes the value of a weight in the scope to its regularizer, and None for a weight without a value there
    (keras/src/layers/layer.py, `_get_regularization_losses`).
    """

    def get_current_value(self, variable: Any) -> Any:
        """Return the value assigned inside the scope, or else the memory of a weight that has a regularizer."""
        value = super().get_current_value(variable)
        return variable._value if value is None and variable.regularizer is not None else value


class AssignmentScope(keras.StatelessScope):
    """A stateless scope that notes which variables are assigned.

    Args:
        mapping: Variables, each with its value.

    Attributes:
        assigned: Each variable by its `id`, with the name scope of its first assignment: that of a layer or a loss.
    """

    def __init__(self, mapping: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(mapping)
        self.assigned: dict[int, tuple[Any, str]] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Note the variable of an update."""
        super().add_update(update)
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        self.assigned.setdefault(id(update[0]), (update[0], scope))


def optimizer_of(model: keras.Model) -> Any:
    """Return the optimizer of a model, None where it is not compiled, or compiled without one (Keras 3.15)."""
    return getattr(model, "optimizer", None)


def optimizers(model: keras.Model) -> list[Any]:
    """Return the optimizers of a model, several for a model with objectives, and the optimizers that they wrap."""
    found = [
        one
        for value in vars(model).values()
        for one in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
        if isinstance(one, keras.Optimizer)
    ]
    return found + [innermost(one) for one in found if innermost(one) is not one]


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that another wraps, as one for scaled losses does, or else the optimizer itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return getattr(optimizer, "inner_optimizer", optimizer)  # a user's own may wrap one too


def home_of(variable: Any) -> tf.distribute.Strategy | None:
    """Return the `tf.distribute` strategy that a variable's memory belongs to, None for plain memory."""
    return _home_of_memory(variable._value)


def _home_of_memory(memory: Any) -> tf.distribute.Strategy | None:
    return memory._distribute_strategy if isinstance(memory, DistributedVariable) else None


def re_create(variable: Any, value: Any = None) -> None:
    """Allocate the memory of a variable again, in the scope and on the device in force.

    Args:
        variable: A Keras variable, perhaps without memory yet.
        value: Its new value; None runs its deferred initializer.
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
    """Note for `re_create` whether tapes watch a variable that gets its memory later."""
    variable._tfpar_watched = variable._trainable


@contextlib.contextmanager
def _watched_as_before(variable: Any) -> Iterator[None]:
    """Let tapes watch the new memory of a variable if they watched the old one, whether it is frozen now or not.

    Keras 3.15 gives the memory of a weight the weight's `trainable` when the weight is created, and only then. A weight
    that is frozen later has a gradient as soon as it is trained again.
    """
    trainable, memory = variable._trainable, variable._value
    watched = getattr(variable, "_tfpar_watched", trainable) if memory is None else getattr(memory, "trainable", True)
    variable._trainable = bool(watched)
    try:
        yield
    finally:
        variable._trainable = trainable


def num_moves(variables: Iterable[Any]) -> int:
    """Return how often the memory of some variables was allocated again, which makes earlier traces invalid."""
    return sum(getattr(variable, "_tfpar_moves", 0) for variable in variables)


def is_allocated(variable: Any) -> bool:
    """Return whether a variable has memory; a pipeline allocates weights when their stages are known."""
    return variable._value is not None


def is_on(variable: Any, device: str) -> bool:
    """Return whether the memory of a variable is on a device: `"GPU:1"` of this process, or one by its full name."""
    of_memory = None if sharded_memory.is_divided(variable) else getattr(variable._value, "device", None)
    return of_memory is not None and full_name(of_memory) == full_name(device)


def are_apart(variables: Iterable[Any]) -> bool:
    """Return whether variables are in the memory of several devices."""
    return len({variable._value.device for variable in variables if variable._value is not None}) > 1


def read_here(variable: Any) -> tf.Tensor:
    """Return the value of a variable on the current device, also where the memory of another holds it."""
    with tf.init_scope(), tf.device(variable._value.device):  # Keras compiles grouped convolutions
        value = variable._value.read_value()
    return tf.identity(value)


def full_name(device: str) -> str:
    """Return the full name of a device that is named in full, or in short as one of this process."""
    spec = tf.DeviceSpec.from_string(device if "/" in device else f"/device:{device}")
    own = tf.DeviceSpec.from_string(tf_distribute.own_task())
    return str(own.make_merged_spec(spec).to_string())


def belongs_to(model: keras.Model) -> tf.distribute.Strategy | None:
    """Return the strategy in whose scope a model was built, or else the one that its weights belong to.

    Keras records the scope in `_distribute_strategy`. It is None for a model that was created outside of the scope from
    the layers of another model.
    """
    noted: tf.distribute.Strategy | None = model._distribute_strategy
    return noted or next(filter(None, map(home_of, model.variables)), None)


def move_trainer(model: keras.Model, home: tf.distribute.Strategy | None) -> None:
    """Set the strategy of a moved model and its optimizer for Keras' own methods.

    Keras' optimizers remember the strategy in whose scope they are created, and find a weight's slots by the weight's
    memory (keras/src/backend/tensorflow/optimizer.py).

    Args:
        model: A model whose variables are all in place.
        home: Their strategy; None for plain memory.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            versions.replace(layer, "_distribute_strategy", home)
    forget_functions(model)
    for optimizer in optimizers(model):
        versions.replace(optimizer, "_distribution_strategy", home or tf.distribute.get_strategy())
        find_slots(optimizer)


def has_lost_slots(model: keras.Model) -> bool:
    """Return whether the memory of weights was allocated again since an optimizer created their slots."""
    return any(
        optimizer._var_key(weight) not in optimizer._trainable_variables_indices
        for optimizer in optimizers(model)
        for weight in optimizer._trainable_variables
    )


def find_slots(optimizer: Any) -> None:
    """Update an optimizer's map from the memory of its weights to their slots (Keras 3.15)."""
    indices = {optimizer._var_key(weight): index for index, weight in enumerate(optimizer._trainable_variables)}
    versions.replace(optimizer, "_trainable_variables_indices", indices)


def forget_functions(model: keras.Model) -> None:
    """Drop the functions that Keras' own `fit`, `evaluate` and `predict` traced: which hold memory of old variables."""
    for name in ("train_function", "test_function", "predict_function"):
        versions.replace(model, name, None)


def bare_variables(model: keras.Model, home: tf.distribute.Strategy | None) -> list[tuple[keras.Layer, Any]]:
    """Return the `tf.Variable`s of another strategy than `home` that layers hold as attributes, with their layers.

    Keras does not track these.
    """
    return [
        (layer, value)
        for layer in model._flatten_layers()
        for attribute in vars(layer).values()
        for value in (attribute if isinstance(attribute, list | tuple) else [attribute])
        if isinstance(value, tf.Variable) and _home_of_memory(value) is not home
    ]


def convert_replicated_variables() -> None:
    """Enable conversions of replicated variables: `float(optimizer.learning_rate)`, `int(iterations)`.

    TensorFlow 2.21's `DistributedVariable` has `numpy`, but not the `__float__`, `__int__` and `__array__` of its other
    variables (tensorflow/python/distribute/values.py), which Keras 3.15 calls (keras/src/backend/common/variables.py).
    """
    methods = {
        "__float__": lambda variable: float(variable.numpy()),
        "__int__": lambda variable: int(variable.numpy()),
        "__array__": lambda variable, dtype=None, copy=None: np.array(variable.numpy(), dtype),
    }
    for name, method in methods.items():
        setattr(DistributedVariable, name, method)

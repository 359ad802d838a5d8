"""State that a model's code changes and that Keras does not track, which is right on one device only.

A layer counts its calls in a variable that is no weight:

one device    step 1: count 1, step 2: count 2
replicas      each has its own count, and the trials before the first step change it too
stages        the passes of a stage get the values of weights as arguments, and return new ones; the count is lost
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, keras_variables, random_state, tf_function, tf_graph
from tfpar.reduction import objective

_STATE_OF_GENERATOR = "seed_generator_state"


@random_state.preserved_random_state()
def check_state(model: keras.Model, batch: Any, training: bool, cuts_model: bool) -> None:
    """Refuse a model whose layers or losses change variables that Keras does not track.

    Keras' own classes track all of theirs, so a model of them alone is not traced.

    Args:
        model: A built model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        training: Whether the model will train, or evaluate and predict.
        cuts_model: Whether the strategy has stages. Replicas draw from generators that Keras does not track.

    Raises:
        ValueError: If there is such a variable.
    """
    if model.run_eagerly or objective.objectives_of(model) or not _has_code_of_users(model):
        return
    changed: dict[str, str] = {}
    with contextlib.suppress(Exception):  # the step itself raises too, with its own message
        changed = _changed(model, data.take_rows(batch, 0, min(2, int(data.num_rows(batch)))), training)
    for variable, scope in changed.items():
        is_generator = variable.endswith(_STATE_OF_GENERATOR)
        if is_generator and not cuts_model:
            continue
        way_out = "Keep the generator in an attribute of a layer"
        if not is_generator:
            way_out = "Create it with self.add_weight(trainable=False) in a layer"
        raise ValueError(
            "A layer or a loss must keep its state in weights that Keras tracks, received "
            f"{_owner(model, scope)!r}, which changes the variable {variable!r} in its call. {way_out}, or use "
            "SingleDevice()."
        )


def _losses(model: keras.Model) -> list[Any]:
    return keras_losses.flat_losses(model) if model.compiled else []


def _has_code_of_users(model: keras.Model) -> bool:
    for layer in keras_model.all_layers(model):
        if isinstance(layer, keras.layers.Lambda) or not keras_model.is_of_keras(type(layer)):
            return True
    return not all(map(keras_losses.is_of_keras, _losses(model)))


def _owner(model: keras.Model, scope: str) -> str:
    """Return the innermost layer or loss of a name scope, in which TensorFlow numbers names."""
    names = [getattr(one, "name", "") for one in (*keras_model.all_layers(model), *_losses(model))]
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    parts = reversed(scope.split("/"))
    found = (name for part in parts for name in longest_first if re.fullmatch(rf"{re.escape(name)}(_\d+)?", part))
    return next(found, scope)


def _changed(model: keras.Model, batch: Any, training: bool) -> dict[str, str]:
    """Return the untracked variables that one step of a model changes, each with a name scope."""
    known = {id(one) for one in (*keras_variables.state(model), *random_state.states_of_no_layer())}
    scope = keras_variables.AssignmentScope()

    def step(batch: Any) -> Any:
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with scope, keras_losses.collect_added_losses(list), tf_function.own_traces():
            outputs = keras_model.call_model(model, inputs, training)
            if not model.compiled:
                return outputs
            return keras_model.compute_loss(model, inputs, targets, outputs, weights, training)

    graph = tf.function(step, autograph=False).get_concrete_function(batch).graph
    changed: dict[str, str] = {}
    for variable, name in scope.assigned.values():
        if id(variable) not in known:
            changed.setdefault(variable.path, name)
    return {**changed, **_assigned(graph)}


def _assigned(graph: Any) -> dict[str, str]:
    """Return the names of `tf.Variable` objects that a graph assigns, each with the name of the operation."""
    names = {id(variable.handle): variable.name for variable in graph.variables}
    captured = {id(inner): names.get(id(outer)) for outer, inner in graph.captures}
    found = {
        captured.get(id(op.inputs[0])) or op.name: op.name for op in graph.get_operations() if tf_graph.assigns(op.type)
    }
    functions = graph.as_graph_def().library.function
    nodes = [(function, node) for function in functions for node in function.node_def if tf_graph.assigns(node.op)]
    return {**found, **{node.name: function.signature.name for function, node in nodes}}

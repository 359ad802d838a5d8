"""Checks of a model and its data before the first step, and the build of the model with the first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_build, keras_losses, keras_model
from tfpar._compat.variables import keras_variables
from tfpar.engines import own_steps
from tfpar.reduction import objective
from tfpar.reduction.losses import dense_losses
from tfpar.reduction.own_step import METHODS, overrides

_STEPS = {"fit": METHODS["train"], "evaluate": METHODS["evaluate"], "predict": METHODS["predict"]}


def check_model(model: Any) -> None:
    """Raise TypeError unless a model function has returned a `keras.Model`."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"The model function must return a compiled keras.Model, received {type(model).__name__}. "
            "End it with `return model`."
        )


def check_steps(model: keras.Model, method: str, *, runs_own_steps: bool) -> None:
    """Refuse a model that overrides a step, or the function of one, where a strategy would not call it.

    Args:
        model: Any model.
        method: "fit", "evaluate" or "predict": the method to check.
        runs_own_steps: Whether the engine runs the steps of models.

    Raises:
        ValueError: If the model overrides a step of one of the methods.
    """
    step = _STEPS[method]
    function = f"make_{step.removesuffix('_step')}_function"
    if keras_model.overridden(model, function):
        raise ValueError(
            f"{type(model).__name__} overrides {function}, and a strategy makes its own function of steps. Override "
            f"{step} in place of it."
        )
    is_replaced = objective.has_objectives(model) and method != "predict"
    if not runs_own_steps and keras_model.overridden(model, step) and not is_replaced:
        raise ValueError(
            f"Stages and shards of weights take a model apart, and {type(model).__name__} overrides {step}, which "
            "takes it whole. Use compute_loss or add_loss in place of it, or train on Mirrored() or MultiWorker()."
        )


def check_loop(model: keras.Model, method: str) -> None:
    """Refuse a model that overrides `fit` or `evaluate`, which a trainer would not call.

    Args:
        model: Any model.
        method: "fit" or "evaluate".

    Raises:
        ValueError: If the model's class overrides the method.
    """
    if not keras_model.replaces_loop(model, method):
        return
    if getattr(model, "preprocessor", None) is not None:
        raise ValueError(
            f"{type(model).__name__}.{method} applies the model's preprocessor, and trainer.{method} does not. Build "
            f"the model with preprocessor=None, and apply it to the data with dataset.map(preprocessor)."
        )
    raise ValueError(
        f"{type(model).__name__} overrides {method}, and trainer.{method} does not call it. Move its code to callbacks "
        f"or to the call of trainer.{method}, and rename the method, or use Keras' own {method}."
    )


def check_compiled(model: keras.Model, method: str) -> None:
    """Refuse to train or evaluate a model that is not compiled; as in Keras, `predict` needs no `compile`.

    Args:
        model: Any model.
        method: "fit" or "evaluate".

    Raises:
        ValueError: If the model is not compiled, or has no optimizer for `fit`.
    """
    if not model.compiled:
        raise ValueError(
            f"You must call `compile()` before calling `{method}()`, and {model.name!r} is not compiled. Call "
            "model.compile(optimizer, loss) in the model function, or trainer.compile(optimizer, loss)."
        )
    if method == "fit" and model.optimizer is None:
        raise ValueError(
            f"`fit()` needs an optimizer, and {model.name!r} is compiled with optimizer=None. Name one in compile()."
        )


def check_gradients(model: keras.Model, strategy: str) -> None:
    """Refuse weights that are overwritten by their gradients, for a strategy that sums gradients of parts of a batch.

    Keras' float8 layers return the new scale of a tensor, a maximum over the batch, as the gradient of the old scale.

    Args:
        model: A built model.
        strategy: Description of the strategy.

    Raises:
        ValueError: If the model has such a weight.
    """
    overwritten = next((weight for weight in model.trainable_variables if weight.overwrite_with_gradient), None)
    if overwritten is not None:
        raise ValueError(
            f"The gradient of a weight must be a sum over the examples, and that of {overwritten.path!r} is its new "
            f"value for the batch, as in float8 training. {strategy} computes gradients in parts. Train on "
            "SingleDevice() or TensorParallel, or without quantize('float8')."
        )


def check_trained(model: keras.Model) -> None:
    """Refuse a model that selects its trained weights by a property, as strategies select them by `trainable`.

    Args:
        model: A built model.

    Raises:
        ValueError: If the class overrides `trainable_weights` or `trainable_variables` to return other weights.
    """
    if objective.objectives_of(model) or overrides(model, "train"):
        return
    own = {id(weight): weight for weight in model.variables if weight.trainable} if model.trainable else {}
    for name in ("trainable_weights", "trainable_variables"):
        named = {id(weight): weight for weight in getattr(model, name)}
        other = next((key for key in [*own, *named] if (key in named) != (key in own)), None)
        if other is not None:
            raise ValueError(
                f"A strategy trains the weights that are trainable, and {name} of {type(model).__name__} "
                f"{'adds' if other in named else 'leaves out'} {(own | named)[other].path!r}. Set `trainable` of "
                "layers or weights in place of the property."
            )


def check_variables(model: keras.Model, home: tf.distribute.Strategy | None) -> None:
    """Refuse to move a model with plain `tf.Variable` objects to another strategy.

    Args:
        model: Any model.
        home: The new `tf.distribute` strategy of its variables; None for no strategy.

    Raises:
        ValueError: If a layer has a `tf.Variable` that belongs to no Keras variable.
    """
    for layer, variable in keras_variables.bare_variables(model, home):
        raise ValueError(
            f"A model that was built outside of the strategy's scope can hold Keras variables only, and layer "
            f"{layer.name!r} holds the tf.Variable {variable.name!r}. Create it with self.add_weight, or build the "
            "model in a function that tfpar.Trainer calls."
        )


def check_inputs(model: keras.Model, inputs: Any) -> None:
    """Refuse inputs that do not have the shapes declared by a functional model.

    Args:
        model: Any model; models without declared inputs are not checked.
        inputs: Tensors or specs `[batch, ...]`.

    Raises:
        ValueError: If the number of inputs or a shape differs.
    """
    declared = getattr(model, "inputs", None)
    if not declared:
        return
    tensors = keras.tree.flatten(inputs)
    if isinstance(inputs, dict):
        # Keras uses the entries of a dict that have the name of an input.
        if not all(tensor.name in inputs for tensor in declared):
            return
        tensors = [inputs[tensor.name] for tensor in declared]
    # The batch may have any size, although a model without keras.Input declares that of its first batch.
    shapes = [None if tensor is None else (None, *tensor.shape[1:]) for tensor in tensors]
    expected = [(None, *tensor.shape[1:]) for tensor in declared]
    if len(shapes) != len(expected) or not all(map(_fits, shapes, expected)):
        raise ValueError(
            f"The data must have the shapes of the model's inputs (None stands for any size). {model.name!r} takes "
            f"{_text(expected)} and the dataset yields {_text(shapes)}. Change keras.Input or the data."
        )


def check_targets(model: keras.Model, targets: Any) -> None:
    """Refuse strings as targets of Keras' losses.

    Args:
        model: A compiled model.
        targets: Tensors or specs `[batch, ...]` in any structure, or None.

    Raises:
        ValueError: If a loss would be computed from strings.
    """
    # Code of the user may look up the strings itself.
    has_own_step = overrides(model, "train") or overrides(model, "evaluate")
    if objective.has_objectives(model) or keras_model.overridden(model, "compute_loss") or has_own_step:
        return
    flat = keras.tree.flatten_with_path(targets)
    losses = keras.tree.flatten(model.loss) if keras.tree.is_nested(model.loss) else [model.loss] * len(flat)
    pairs = zip(losses, flat, strict=True) if len(losses) == len(flat) else ()
    for loss, (path, target) in pairs:
        if loss is None or target is None or target.dtype != tf.string:
            continue
        if isinstance(loss, keras.losses.Loss) and type(loss).__call__ is not keras.losses.Loss.__call__:
            continue
        where = f" for {'/'.join(map(str, path))!r}" if path else ""
        raise ValueError(
            f"The targets of a loss must be numbers, and {model.name!r} received strings{where}. Encode the labels in "
            "the data, for instance with keras.layers.StringLookup, as integers or with output_mode='one_hot'."
        )


def check_batched(model: keras.Model, spec: Any) -> None:
    """Refuse a dataset of single examples.

    Args:
        model: Any model; its declared inputs tell examples from batches.
        spec: The `element_spec` of the dataset.

    Raises:
        ValueError: If the elements have no batch axis.
    """
    shapes = _known_shapes(spec)
    inputs = _known_shapes(keras.utils.unpack_x_y_sample_weight(spec)[0])
    declared = [tuple(tensor.shape[1:]) for tensor in getattr(model, "inputs", None) or ()]
    are_examples = bool(inputs) and len(inputs) == len(declared) and all(map(_is_example, inputs, declared))
    # Declared inputs may differ in their numbers of rows, such as the edges and nodes of a graph.
    differ = not declared and len({shape[0] for shape in shapes if shape and shape[0] is not None}) > 1
    if () in shapes or differ or are_examples:
        has_batch = any(shape[:1] == (None,) for shape in shapes)
        advice = " Repeat a number that belongs to a whole batch for each of its examples." if has_batch else ""
        raise ValueError(
            f"Every element of a dataset must be a batch, with a first axis over its examples, and the shapes of an "
            f"element are {_text(shapes)}. Batch it with dataset.batch(global batch), such as dataset.batch(32); "
            f"Python code yields whole batches.{advice}"
        )


def _known_shapes(spec: Any) -> list[tuple[int | None, ...]]:
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    return [tuple(shape) for shape in shapes if shape is not None and shape.rank is not None]


def _is_example(shape: tuple[int | None, ...], expected: tuple[int | None, ...]) -> bool:
    return (
        len(shape) == len(expected)
        and _fits((None, *shape), (None, *expected))
        and not _fits((None, *shape[1:]), (None, *expected))
    )


def _fits(shape: tuple[int | None, ...] | None, expected: tuple[int | None, ...]) -> bool:
    if shape is None:
        return True  # an optional input, which Keras checks
    # Keras adds or drops a last axis of size 1.
    candidates = [shape, (*shape, 1)] + ([shape[:-1]] if shape[-1:] == (1,) else [])
    return any(
        len(candidate) == len(expected)
        and all(a is None or b is None or a == b for a, b in zip(candidate, expected, strict=True))
        for candidate in candidates
    )


def _text(shapes: Sequence[tuple[int | None, ...] | None]) -> str:
    return ", ".join(str(shape) for shape in shapes)


def build(
    model: keras.Model,
    batch: Any,
    kind: str,
    creating_slots: Callable[[keras.Model], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Create the weights, metrics and optimizer slots of a model with the first batch, inside the strategy's scope.

    As in Keras, the optimizer is built by the first `fit`: layers may be frozen between an evaluation and that `fit`.

    Args:
        model: A model; compiled unless `kind` is "predict".
        batch: A global batch, `(inputs, targets, sample_weight)`; the last two are optional.
        kind: "train", "evaluate" or "predict".
        creating_slots: Returns a context in which the optimizers of the model create their slots.

    Raises:
        ValueError: If the data do not have the shapes that the model needs.
    """
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if overrides(model, kind):
        own_steps.build(model, kind, creating_slots)
        return
    if kind == "predict":
        if not model.built:
            keras_model.call_model(model, inputs, training=False)
        return
    if objective.objectives_of(model):
        objective.build(model, batch, creating_slots)
        return
    reducing = keras_losses.every_loss_reduction(_reduce_dense, keras_losses.aggregate_added_loss)
    with reducing, _naming_targets(model, targets):
        keras_build.symbolic_build(model, batch, training=kind == "train")
    if kind == "train" and not model.optimizer.built:
        with creating_slots(model):
            model.optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def _naming_targets(model: keras.Model, targets: Any) -> Iterator[None]:
    """Replace Keras' various errors about a loss without targets by a clear one."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        has_loss = any(loss is not None for loss in keras.tree.flatten(model.loss))
        if targets is not None or not has_loss or keras_model.overridden(model, "compute_loss"):
            raise
        raise ValueError(
            f"The loss of {model.name!r} needs targets, and the data yields inputs alone. Yield (inputs, targets), or "
            "pass the targets as y."
        ) from error


def _reduce_dense(values: Any, weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
    """Reduce a loss as Keras does, with a clear error for ragged values."""
    loss: tf.Tensor = keras_losses.reduce_weighted_values(
        dense_losses(values, reduction), weight, mask, reduction, dtype
    )
    return loss

"""Tracing of a model's operations on symbolic tensors (Keras 3.15).

Keras records the operations of Functional models only, with nested models as single operations, and nothing inside the
`call` of a subclass. `record` intercepts the calls while a model runs on symbolic tensors:

    model(symbolic)
      └─ Layer.__call__ ── casts, masks, training
           └─ symbolic_call ── a model: its own `call`, whose layers are intercepted in turn
                               a layer: the shapes of its outputs, and an entry in the list

The patches affect all threads, so no other thread may call layers meanwhile. They end with the context.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import keras
from keras.src import backend
from keras.src.backend.common import global_state, keras_tensor
from keras.src.backend.common.variables import Variable
from keras.src.layers import layer as layer_module
from keras.src.layers.layer import CallContext
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional
from keras.src.ops.core import ConvertToTensor

from tfpar._compat import versions
from tfpar._compat.models import keras_blocks, keras_model, keras_remat
from tfpar._compat.models.keras_loss_operations import AddedLoss, ReducedLoss
from tfpar._compat.models.keras_recorded import Frame, Recorded, Symbolic, is_alike, training_in_context


def record(
    model: keras.Model,
    inputs: Any,
    training: bool,
    opens: Callable[[keras.Layer], bool] | None = None,
    *,
    symbolic_sizes: bool = False,
) -> tuple[list[Recorded], Any]:
    """Run a built model on symbolic tensors, and return its operations in order and its outputs.

    Inner models are opened if they can run on symbolic tensors; others count as single operations.

    Args:
        model: The model.
        inputs: Symbolic tensors in the structure of the model's first argument.
        training: The argument `training`, if the model's call accepts it.
        opens: Returns whether to open a layer with inner layers. By default, none is opened.
        symbolic_sizes: Whether to record operations on unknown sizes in opened layers.

    Raises:
        Exception: Whatever the model's `call` raises on symbolic tensors.
    """
    recorder = _Recorder(model, opens or (lambda layer: False), symbolic_sizes)
    with recorder.listening():
        outputs = model(inputs, **keras_model.training_argument(model, training))
    return recorder.calls, outputs


def recorded_call(operation: keras.Operation) -> Callable[..., Any]:
    """Return the call of an operation as it was recorded: Keras' own `__call__`, without a user's override.

    The operations of a user's `__call__` are recorded separately.

    Args:
        operation: A layer, or an operation of `keras.ops`.
    """
    methods = (vars(base)["__call__"] for base in type(operation).__mro__ if "__call__" in vars(base))
    return functools.partial(next(filter(keras_model.is_of_keras, methods)), operation)


class _Recorder:
    def __init__(self, model: keras.Model, opens: Callable[[keras.Layer], bool], symbolic_sizes: bool) -> None:
        self._model, self._opens, self._symbolic_sizes = model, opens, symbolic_sizes
        self._blocks: list[keras.Layer] = []
        self._frames: list[Frame] = []
        self._path: list[str] = []
        self._is_inside = False  # inside an operation that is not opened
        self._constants: dict[int, tuple[keras.KerasTensor, Any]] = {}  # by id of the placeholder
        self.calls: list[Recorded] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def method(function: Any) -> Any:
            return lambda instance, *args, **kwargs: function(instance, *args, **kwargs)

        replaced = [
            (keras.Layer, "__call__", method(self._call_layer)),
            (keras.Layer, "symbolic_call", method(self._call_symbolic)),
            (keras.Layer, "add_loss", method(self._add_loss)),
            (keras.Operation, "symbolic_call", method(self._operate)),
            (loss_module, "reduce_weighted_values", self._reduce_loss),
            (Variable, "value", property(self._read)),
            (Variable, "assign", method(self._assign)),
            # Keep layers from recording nodes.
            (layer_module, "Node", lambda **_: None),
            (keras_tensor, "KerasTensor", Symbolic("Symbolic", (), {"is_symbolic": self.is_symbolic})),
        ]
        self._originals = {name: getattr(owner, name) for owner, name, _ in replaced if owner is not keras.Operation}
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_remat.called_once())
            for owner, name, replacement in replaced:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            if keras.config.is_traceback_filtering_enabled():  # adds pages of text to every error message
                keras.config.disable_traceback_filtering()
                stack.callback(keras.config.enable_traceback_filtering)
            if self._symbolic_sizes:
                stack.enter_context(keras_blocks.recording_sizes(self._is_in_block, self._apply))
            yield

    def is_symbolic(self, leaf: Any) -> bool:
        """Return whether an operation on it is recorded; includes weights, which would otherwise become constants."""
        return isinstance(leaf, keras.KerasTensor) or (not self._is_inside and isinstance(leaf, Variable))

    def _call_layer(self, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        call = self._originals["__call__"]
        if self._is_inside:
            return call(layer, *args, **kwargs)
        original_args, original_kwargs = args, dict(kwargs)
        if not any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs))):
            args, kwargs = keras.tree.map_structure(self._as_symbolic, (args, kwargs))
        frame = Frame(original_kwargs)
        self._frames.append(frame)
        try:
            outputs = call(layer, *args, **kwargs)
        finally:
            self._frames.pop()
        if not frame.opened:
            self._append(layer, original_args, original_kwargs, outputs, frame.training)
        return self._with_masks(outputs) if frame.is_block else outputs

    def _with_masks(self, outputs: Any) -> Any:
        """Record the masks that a block sets on its outputs."""

        def with_mask(output: Any) -> Any:
            mask = backend.get_keras_mask(output)
            return output if mask is None else self._apply(keras_blocks.WithMask(), output, mask)

        return keras.tree.map_structure(with_mask, outputs)

    def _is_in_block(self) -> bool:
        return bool(self._blocks) and not self._is_inside

    def _apply(self, operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        """Record one of tfpar's own operations."""
        with self._inside():
            outputs = operation.compute_output_spec(*args, **kwargs)
        self._append(operation, args, kwargs, outputs, None)
        return outputs

    def _call_symbolic(self, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        frame = self._frames[-1]
        frame.training = training_in_context()
        if layer is self._model:
            frame.opened = True
            return layer.call(*args, **kwargs)
        is_block = not self._is_inside and self._opens(layer)
        if is_block or (not self._is_inside and _can_open(layer, frame.kwargs)):
            num_calls, blocks = len(self.calls), self._blocks
            self._path.append(layer.name)
            self._blocks = [*blocks, *[layer] * is_block]
            try:
                outputs = layer.call(*args, **kwargs)
                made = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
                if made and all(isinstance(leaf, keras.KerasTensor) for leaf in made):
                    frame.opened, frame.is_block = True, is_block
                    return outputs
            except Exception:  # its `call` cannot be traced, so it stays one operation
                pass
            finally:
                self._path.pop()
                self._blocks = blocks
            del self.calls[num_calls:]
        with self._inside():
            outputs = self._spec(layer, args, kwargs)
            keras_model.propagate_training(layer, args, kwargs)
        keras_blocks.change_masks(layer, args, kwargs, outputs)
        return outputs

    def _operate(self, operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        sizes = getattr(operation, "shape", getattr(operation, "newshape", None))
        if isinstance(sizes, tuple | list) and None in sizes:
            raise ValueError(
                f"it passes the size of the batch to {operation.name!r}, and micro-batches have other sizes"
            )
        if self._blocks and any(map(callable, keras.tree.flatten((vars(operation), args, kwargs)))):
            raise ValueError(f"it passes a function to {operation.name!r}, which may read symbolic tensors")
        with self._inside():
            outputs = self._spec(operation, args, kwargs)
        if isinstance(operation, ConvertToTensor) and is_alike(args[0], outputs):
            return args[0]  # keeps its mask
        if not self._is_inside:
            self._append(operation, args, kwargs, outputs, None)
        return outputs

    def _spec(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Return symbolic outputs; in a block, run the operation if Keras cannot infer them, as for unknown slices."""
        try:
            return operation.compute_output_spec(*args, **kwargs)
        except Exception:
            if not self._blocks:
                raise
            return backend.compute_output_spec(operation.call, *args, **kwargs)

    def _add_loss(self, layer: keras.Layer, loss: Any) -> None:
        if self._is_inside:
            self._originals["add_loss"](layer, loss)
            return
        for value in keras.tree.flatten(loss):
            self._append(AddedLoss(layer), (value,), {}, (), None)

    def _reduce_loss(
        self, values: Any, sample_weight: Any = None, mask: Any = None,
        reduction: str | None = "sum_over_batch_size", dtype: Any = None,
    ) -> Any:  # fmt: skip
        loss = values, sample_weight, mask
        if self._is_inside or not any(isinstance(tensor, keras.KerasTensor) for tensor in loss):
            return self._originals["reduce_weighted_values"](*loss, reduction, dtype)
        return ReducedLoss(reduction, dtype).symbolic_call(*loss)

    def _read(self, variable: Variable) -> Any:
        if self._is_inside:
            return self._originals["value"].fget(variable)
        raise ValueError(f"it reads the weight {variable.path!r} outside of a layer and of keras.ops")

    def _assign(self, variable: Variable, value: Any) -> Any:
        if self._is_inside:
            return self._originals["assign"](variable, value)
        raise ValueError(f"it changes the state {variable.path!r} outside of a layer")

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _as_symbolic(self, leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        symbolic = keras.KerasTensor(leaf.shape, backend.standardize_dtype(leaf.dtype))
        self._constants[id(symbolic)] = symbolic, leaf
        return symbolic

    def _constant(self, leaf: Any) -> Any:
        """Return the constant that a placeholder stands for; any other argument unchanged."""
        return self._constants[id(leaf)][1] if id(leaf) in self._constants else leaf

    def _append(self, operation: Any, args: Any, kwargs: Any, outputs: Any, training: bool | None) -> None:
        scope = backend.get_autocast_scope()
        made = tuple(leaf for leaf in keras.tree.flatten(outputs) if isinstance(leaf, keras.KerasTensor))
        is_layer = isinstance(operation, keras.Layer)
        named = {name: value for name, value in kwargs.items() if name != "training" or not is_layer}
        args, named = keras.tree.map_structure(self._constant, (args, named))
        path = (*self._path, operation.name)
        blocks = tuple(self._blocks)
        self.calls.append(Recorded(operation, args, named, made, path, training, scope and scope.dtype, blocks))


def _can_open(layer: keras.Layer, kwargs: dict[str, Any]) -> bool:
    # A mask passed to a Functional model is set on its input, which a graph of tensors does not show. A model with
    # several inputs gets a mask, or None, for each.
    masks = keras.tree.flatten(kwargs.get("mask"))
    takes_mask = any(mask is not None for mask in masks) and not has_own_call(layer)
    return isinstance(layer, keras.Model) and not takes_mask and not has_own_ending(layer)


def is_built(model: keras.Model) -> bool:
    """Return whether a model and its layers at every depth are built."""
    return all(layer.built for layer in model._flatten_layers())


def has_own_call(model: keras.Layer) -> bool:
    """Return whether a model defines `call` in Python, unlike Functional and Sequential models."""
    return type(model).call not in (Functional.call, keras.Sequential.call)


def has_own_ending(model: keras.Layer) -> bool:
    """Return whether Keras adds a mask or an activity regularizer to the outputs of the model's `call`."""
    return type(model).compute_mask is not keras.Layer.compute_mask or model.activity_regularizer is not None


def declared_inputs(model: keras.Model) -> Any:
    """Return the symbolic inputs of a Functional or built Sequential model in their structure, else None.

    The public `model.inputs` is flat.
    """
    functional = _functional(model)
    return None if functional is None else functional._inputs_struct


def standardize_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """Convert the inputs of a model with declared inputs as its `call` does, and return them flat."""
    functional = _functional(model)
    functional._assert_input_compatibility(inputs)
    return list(functional._standardize_inputs(inputs))


def _functional(model: keras.Model) -> Any:
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def takes_training(operation: keras.Operation) -> bool:
    """Return whether a layer's call accepts `training`, as Functional models check it (`operation_fn`)."""
    if not isinstance(operation, keras.Layer):
        return False
    return "training" in versions.private(operation, "_call_context_args")


def autocast(dtype: str | None) -> contextlib.AbstractContextManager[Any]:
    """Cast weights when they are read in this context, as Keras does around a `call` in mixed precision."""
    return contextlib.nullcontext() if dtype is None else backend.AutocastScope(dtype)


@contextlib.contextmanager
def one_model_call(operations: Iterable[keras.Operation]) -> Iterator[None]:
    """Run operations in this context as in a single call of a model, after clearing their losses.

    A Keras 3.15 layer called outside a model clears its losses first, so that a layer called twice would lose those of
    its first call.
    """
    for operation in operations:
        layer = operation.model if isinstance(operation, AddedLoss) else operation
        if isinstance(layer, keras.Layer):
            layer._clear_losses()
    outer = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", CallContext(entry_layer=None))
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", outer)

"""The compiled functions that run the steps of a model, each compiled at its first use."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import kernels, xla_choice
from tfpar._compat import tf_determinism
from tfpar._compat.graphs import tf_function, tf_layout
from tfpar._compat.models import keras_model, keras_remat
from tfpar._compat.variables import keras_variables
from tfpar.engines.engine import Engine
from tfpar.engines.steps import launched_steps, multi_step
from tfpar.engines.steps.hidden_errors import revealed
from tfpar.recomputation.backward_copies import recomputing
from tfpar.recomputation.choice import chosen
from tfpar.strategies import Distributed


class _Trained(NamedTuple):
    """The optimizer and the weights with which a train step was traced."""

    optimizer: Any
    paths: list[str]  # of the weights
    trainable: list[bool]
    num_moves: int  # how often variables had been moved at the last check


class StepFunctions:
    """The compiled functions that run the steps of a model, traced again after each `compile` of the model.

    Args:
        model: A compiled model.
        engine: Supplies the steps.
        fused: Whether steps use fused kernels.
    """

    def __init__(self, model: keras.Model, engine: Engine, fused: bool = True) -> None:
        self._model, self._engine, self._fused = model, engine, fused
        self._compilation: Any = None
        self._num_moves = 0
        self._weights: list[keras.Variable] = []
        self._compiled: dict[str, Any] = {}
        self._inputs: dict[str, str] = {}
        self._trained: _Trained | None = None  # set by the first trace of a train step since `compile`

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Return the context in which steps are traced, with fused kernels unless XLA is used."""
        fuses = self._fused and not self._model.jit_compile
        with keras_remat.called_once(), kernels.fused() if fuses else contextlib.nullcontext():
            yield

    def once(self, kind: str, compile_it: Callable[[], Any], inputs: str = "") -> Any:
        """Compile a function once, until the model is compiled again, has other weights, or its variables are moved.

        As in Keras, a change of `trainable` takes effect at the next `compile`.

        Args:
            kind: The kind of function.
            compile_it: Compiles the function.
            inputs: A key of other inputs of the compilation; it is repeated if the key differs from the last one.
        """
        # Not the id of the compilation, which may be reused once it is freed.
        compilation = keras_model.compilation(self._model)
        num_moves = keras_variables.num_moves(keras_variables.state(self._model))
        weights = self._model.weights  # other ones after quantize(), for which Keras traces again
        if compilation is not self._compilation:
            self._trained = None
        is_same = len(weights) == len(self._weights) and all(map(operator.is_, weights, self._weights))
        if compilation is not self._compilation or num_moves != self._num_moves or not is_same:
            self._compilation, self._num_moves, self._weights = compilation, num_moves, weights
            self._compiled.clear()
        if kind not in self._compiled or self._inputs.get(kind, "") != inputs:
            self._compiled[kind] = compile_it()
            self._inputs[kind] = inputs
        return self._compiled[kind]

    def check_trained(self) -> None:
        """Raise an error if the train step must be traced again after a change that requires `compile`.

        Raises:
            ValueError: If the weights, or after a move the optimizer or `trainable`, differ from those traced.
        """
        num_moves = keras_variables.num_moves(keras_variables.state(self._model))
        is_new = keras_model.compilation(self._model) is not self._compilation
        if self._trained is None or is_new:
            return
        if self._trained.paths != _paths(self._model):
            raise ValueError(
                f"{self._model.name!r} has other weights than in its last train step, as after enable_lora(), "
                "quantize() or pop(). Call compile() after such a change."
            )
        if num_moves == self._trained.num_moves:
            return
        optimizer = keras_variables.optimizer_of(self._model)
        if optimizer is not self._trained.optimizer:
            raise ValueError(
                f"An optimizer is set with compile(), and {self._model.name!r} was assigned another one: "
                f"{getattr(optimizer, 'name', None)!r}. Call compile(optimizer=...)."
            )
        if self._trained.trainable != keras_model.trainable_settings(self._model):
            raise ValueError(
                f"Another trainer has moved weights of {self._model.name!r}, whose step must be traced again, and "
                "`trainable` has changed since `compile`. Call compile() after such a change, or give both trainers "
                "the same strategy object."
            )
        self._trained = self._trained._replace(num_moves=num_moves)

    def loop(self, kind: str, distributed: Distributed) -> multi_step.StepLoop:
        """Return the compiled loop over steps of a kind, "train" or "evaluate", on a dataset."""
        model = self._model
        xla_choice.check(model)
        # One function for elements of any size, but of one rank, so that the trace knows the number of axes.
        elements = tf.nest.map_structure(_without_sizes, distributed.dataset.element_spec)
        key = f"{kind} {(distributed.uneven_end, distributed.unknown_end)} {elements} {tf_determinism.is_enabled()}"
        compiled: multi_step.StepLoop = self.once(key, lambda: self._compiled_loop(kind, distributed))
        if kind == "train" and self._trained is None:
            self._trained = _Trained(
                keras_variables.optimizer_of(model),
                _paths(model),
                keras_model.trainable_settings(model),
                self._num_moves,
            )
        return compiled

    def _compiled_loop(self, kind: str, distributed: Distributed) -> multi_step.StepLoop:
        model, engine = self._model, self._engine
        run_step = engine.train_step if kind == "train" else engine.evaluate_step

        def step(batch: Any) -> tf.Tensor:
            # Stages repeat operations by themselves.
            layers = [] if kind != "train" or engine.cuts_model else chosen(model, engine.recompute)
            with self.kernels(), recomputing(layers, bool(model.jit_compile)):
                return run_step(model, batch)

        def logs() -> dict[str, tf.Tensor]:
            return engine.logs(model, kind)

        # XLA fixes sizes by itself. Workers must trace alike, whatever the sizes of their local batches.
        fixes_sizes = engine.job.num_workers == 1 and not engine.cuts_model and not model.jit_compile
        parts = multi_step.LoopParts(
            step,
            logs,
            distributed.num_examples,
            distributed.has_more,
            lambda element: engine.step_batch(model, element),
            distributed.digest,
            device=engine.step_device,
            jit_compile=self._whole_step_in_xla,
            run_again=self._again(kind),
        )
        if launched_steps.suits(engine.device_names) and not model.run_eagerly:
            return launched_steps.LaunchedSteps(parts, fixes_sizes=fixes_sizes, fallback=self._fallback)
        return multi_step.compile_loop(parts, run_eagerly=model.run_eagerly)

    def _fallback(self) -> xla_choice.Fallback | None:
        """Return the fallback from XLA if XLA was chosen automatically."""
        return xla_choice.Fallback(self._model, self._engine) if keras_model.is_chosen(self._model) else None

    def predict(self, spec: Any) -> Callable[[Any], Any]:
        """Return a function that predicts on elements of a spec."""
        xla_choice.check(self._model)

        def compile_it() -> Callable[[Any], Any]:
            predict_batch, run_again, fallback = compile_step(), self._again("predict"), self._fallback()

            def run(batch: Any) -> Any:
                revealing = contextlib.nullcontext() if run_again is None else revealed(lambda: run_again(batch))
                with revealing, tf_layout.best_for_gpus(), tf_function.repeatable_names():
                    return predict_batch(batch)

            def predict(batch: Any) -> Any:
                nonlocal predict_batch, fallback
                try:
                    outputs = run(batch)
                except xla_choice.ERRORS as error:
                    if fallback is None:
                        raise
                    fallback.leave_xla()
                    predict_batch = compile_step()
                    outputs = run(batch)
                    fallback.explain(error)
                fallback = None
                return outputs

            return predict

        def predict_step(batch: Any) -> Any:
            with self.kernels():
                return self._engine.predict_step(self._model, batch)

        def compile_step() -> Callable[[Any], Any]:
            if self._model.run_eagerly:
                return predict_step
            in_xla = self._whole_step_in_xla
            predict_batch: Callable[[Any], Any] = tf.function(
                multi_step.alone_on_devices(predict_step, in_xla),
                input_signature=[spec],
                autograph=False,
                jit_compile=in_xla or None,
            )
            device = self._engine.step_device
            if not in_xla or device is None:
                return predict_batch

            def on_device(batch: Any) -> Any:
                with tf.device(device):  # XLA compiles for this device, which must hold the weights
                    return predict_batch(batch)

            return on_device

        compiled: Callable[[Any], Any] = self.once(f"predict {spec}", compile_it)
        return compiled

    def _again(self, kind: str) -> Callable[[Any], None] | None:
        """Return a function that runs a failed step again to find the error; None if TensorFlow reports it."""
        again = None if self._model.run_eagerly else self._engine.step_again
        return None if again is None else functools.partial(again, self._model, kind)

    @property
    def _whole_step_in_xla(self) -> bool:
        engine = self._engine
        return bool(self._model.jit_compile and engine.num_replicas == 1 and not engine.cuts_model)


def _without_sizes(spec: Any) -> str:
    return f"{type(spec).__name__} {getattr(spec, 'dtype', None)} {spec.shape.rank if hasattr(spec, 'shape') else None}"


def _paths(model: keras.Model) -> list[str]:
    return [weight.path for weight in model.weights]

"""What `fit`, `evaluate` and `predict` need before their first step: a stream, a built model, a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar.loops.callback_list import callback_list
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.evaluate_loop import evaluate
from tfpar.loops.step_calls import RunSteps, StepCalls, limited_steps
from tfpar.loops.step_functions import StepFunctions
from tfpar.reduction import objective
from tfpar.strategies import Distributed, Strategy, model_checks


class Preparation:
    """Prepare one model for its calls of `fit`, `evaluate` and `predict` under one strategy.

    Args:
        model: The model.
        strategy: Distributes data and supplies the steps.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self._model, self._strategy = model, strategy
        self._compiled = StepFunctions(model, strategy)

    def stream(
        self,
        dataset: data.Batches,
        steps: int | None,
        kind: str,
        begun: tuple[Any, EpochIterator] | None = None,
        restarts: bool = False,
    ) -> tuple[EpochIterator, RunSteps]:
        """Distribute a dataset, create what the model only can with its first batch, and compile the loop over it.

        Args:
            dataset: Global batches.
            steps: Steps an epoch; None for a whole pass.
            kind: "train" or "evaluate".
            begun: A dataset and a stream of it of which nothing was taken yet.
            restarts: Whether every epoch begins a pass, also where `steps` is given.
        """
        method = "fit" if kind == "train" else "evaluate"
        with self._strategy.together():
            model_checks.check_compiled(self._model, method)
            model_checks.check_steps(self._model, method)
            distributed, source, first = self._distribute(dataset)

        def has_more(upcoming: tf.experimental.Optional) -> tf.Tensor:
            return self._strategy.has_more(upcoming, distributed)

        goes_on = begun[1] if begun is not None and begun[0] is dataset else None
        together = self._strategy.together
        stream = EpochIterator(distributed.dataset, steps, has_more, goes_on, source, first, restarts, together)
        batch = self._build(stream, distributed, kind)
        if source is not None and goes_on is None:
            source.start(self._strategy.broadcast)
        training = kind == "train"
        if not objective.objectives_of(self._model):
            self._prepare_outputs(batch, training)
        self._compiled.once("prepare", lambda: self._strategy.prepare(self._model, batch))
        present = str(tf.nest.map_structure(lambda tensor: tensor is not None, batch))  # optional inputs may be None
        prepare_loss = functools.partial(self._strategy.prepare_loss, self._model, batch, training)
        self._compiled.once(f"{kind} loss", prepare_loss, present)
        return stream, self._compiled.loop(kind, distributed)

    def predictions(self, dataset: data.Batches, steps: int | None) -> tuple[EpochIterator, Callable[[Any], Any]]:
        """Distribute a dataset, build the model with its first batch, and compile what predicts on one element."""
        with self._strategy.together():
            model_checks.check_steps(self._model, "predict")
            whole = dataset.whole() if isinstance(dataset, data.Sharded) else dataset
            distributed, source, first = self._distribute(whole)
        stream = EpochIterator(distributed.dataset, steps, source=source, first=first, together=self._strategy.together)
        batch = self._build(stream, distributed, "predict")
        self._prepare_outputs(batch, training=False)
        return stream, self._compiled.predict(distributed.dataset.element_spec)

    def _prepare_outputs(self, batch: Any, training: bool) -> None:
        prepare = self._strategy.prepare_outputs
        self._compiled.once(f"outputs in training: {training}", lambda: prepare(self._model, batch, training))

    def _distribute(
        self, dataset: data.Batches
    ) -> tuple[Distributed, data.PythonBatches | None, tf.data.Dataset | None]:
        """Return the distributed dataset, the Python code behind it, and one element to look at before that runs."""
        if not isinstance(dataset, data.Sharded):
            model_checks.check_batched(self._model, dataset.element_spec)
        if not isinstance(dataset, data.PythonBatches):
            return self._strategy.distribute(dataset), None, None
        distribute = self._strategy.distribute
        return distribute(dataset.dataset), dataset, distribute(dataset.first).dataset

    def batches(self, x: Any, y: Any = None, sample_weight: Any = None, **settings: Any) -> data.Batches:
        """Return `data.as_dataset(...)`; where one worker's data are refused, all workers raise.

        Args:
            x: As for `data.as_dataset`.
            y: As for `data.as_dataset`.
            sample_weight: As for `data.as_dataset`.
            **settings: As for `data.as_dataset`.
        """
        with self._strategy.together():
            return data.as_dataset(x, y, sample_weight, **settings)

    def _build(self, stream: EpochIterator, distributed: Distributed, kind: str) -> Any:
        with self._strategy.together():
            batch = self._strategy.local_batch(stream.peek())
            model_checks.check_inputs(self._model, keras.utils.unpack_x_y_sample_weight(batch)[0])
        # What differs would be noticed in the middle of what workers create together, and some would wait there.
        self._strategy.require_equal({"the shapes of the data": _shapes(distributed.dataset.element_spec)})
        self._strategy.adopt(self._model)  # the model may be compiled again since, outside of the scope
        with self._strategy.together(), self._strategy.scope():
            self._strategy.place(self._model, batch, kind == "train")
            model_checks.build(self._model, batch, kind)
        self._strategy.adopt(self._model)  # metrics of the user's own belong to the model only now
        return batch

    def caller(
        self,
        run_steps: RunSteps,
        stream: EpochIterator,
        listeners: keras.callbacks.CallbackList,
        steps_per_call: int | None = None,
        testing: bool = False,
    ) -> StepCalls:
        """Return what calls a compiled loop on a stream."""
        return StepCalls(run_steps, self._model, self._strategy, stream, listeners, steps_per_call, testing)

    def listeners(
        self, callbacks: Any, verbose: int | str, stream: EpochIterator, epochs: int = 1, add_history: bool = False
    ) -> Any:
        """Return the list of callbacks of one call."""
        return callback_list(
            callbacks, self._model, self._strategy.is_chief, verbose, epochs, stream.steps_per_epoch, add_history
        )

    def validation(
        self,
        validation_data: Any,
        batch_size: int | None,
        steps: int | None,
        frequency: int | Sequence[int],
        listeners: keras.callbacks.CallbackList,
    ) -> Callable[[int], dict[str, float]]:
        """Return what evaluates after an epoch and gives its logs, none where none is due.

        Raises:
            ValueError: If the frequency is neither a number of epochs nor a list of them.
        """
        if validation_data is None:
            return lambda epoch: {}
        if not (frequency >= 1 if isinstance(frequency, int) else isinstance(frequency, Collection)):
            raise ValueError(
                f"validation_freq must be a number of epochs of at least 1 or a list of epochs, received {frequency!r}."
            )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        steps = limited_steps(steps)
        dataset = self.batches(x, y, sample_weight, batch_size=batch_size, steps=steps)
        stream, run_steps = self.stream(dataset, steps, "evaluate", restarts=True)
        caller = self.caller(run_steps, stream, listeners, testing=True)

        def validate(epoch: int) -> dict[str, float]:
            due = (epoch + 1) % frequency == 0 if isinstance(frequency, int) else epoch + 1 in frequency
            return {f"val_{name}": value for name, value in evaluate(caller).items()} if due else {}

        return validate


def _shapes(spec: Any) -> str:
    """Return the type and shape of each tensor of an element, without the number of its examples; a line for each."""
    leaves = keras.tree.flatten_with_path(spec)
    return "\n".join(f"{'/'.join(map(str, path))}: {_shape(leaf)}" for path, leaf in leaves)


def _shape(spec: Any) -> str:
    shape = getattr(spec, "shape", None)
    sizes = "" if shape is None else "unknown" if shape.rank is None else str(tuple(shape[1:]))
    dtype = getattr(spec, "dtype", None)
    return f"{type(spec).__name__} {'' if dtype is None else dtype.name} {sizes}"

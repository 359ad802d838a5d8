"""The preparation of `fit`, `evaluate` and `predict`: an epoch iterator, a built model and a compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat.variables import keras_weight_placement
from tfpar.engines import model_checks, own_steps
from tfpar.engines.steps.multi_step import StepLoop
from tfpar.full_precision import full_precision
from tfpar.loops.agreement import equal_workers
from tfpar.loops.agreement.chief_logs import share_logs
from tfpar.loops.agreement.deferred_errors import DeferringCallbacks
from tfpar.loops.callback_list import callback_list, saves_models
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.evaluate_loop import evaluate
from tfpar.loops.resuming import initial_state
from tfpar.loops.resuming.read_order import ReadOrder
from tfpar.loops.step_calls import StepCalls, limited_steps
from tfpar.loops.step_functions import StepFunctions
from tfpar.messages import user_warnings
from tfpar.reduction import objective
from tfpar.strategies import Distributed, SingleDevice, Strategy


class Preparation:
    """Prepares a model for `fit`, `evaluate` and `predict` under a strategy.

    Args:
        model: The model.
        strategy: The strategy.
        fused: Whether steps use fused kernels.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, fused: bool = True) -> None:
        self._model, self._strategy, self._engine = model, strategy, strategy.engine
        self._compiled = StepFunctions(model, strategy.engine, fused)
        self.kernels = self._compiled.kernels
        self._read_order = ReadOrder(strategy.job)

    def prepare_loop(
        self,
        dataset: data.Batches,
        steps: int | None,
        kind: str,
        unused: tuple[Any, EpochIterator] | None = None,
        restarts: bool = False,
    ) -> tuple[EpochIterator, StepLoop]:
        """Distribute a dataset, build and check the model with its first batch, and compile the loop.

        Args:
            dataset: Global batches.
            steps: Steps per epoch. None: one pass over the data.
            kind: "train" or "evaluate".
            unused: A dataset and an unused iterator over it, to reuse if `dataset` is that dataset.
            restarts: Whether every epoch begins a new pass, even if `steps` is set.
        """
        method = "fit" if kind == "train" else "evaluate"
        with self._strategy.job.vote():
            model_checks.check_compiled(self._model, method)
            model_checks.check_steps(self._model, method, runs_own_steps=self._engine.runs_own_steps)
            model_checks.check_loop(self._model, method)
            if not (isinstance(dataset, data.Sharded) or isinstance(self._strategy, SingleDevice)):
                data.check_ranks(dataset.element_spec)
            distributed, source, first = self._distribute(dataset)

        reused = unused[1] if unused is not None and unused[0] is dataset else None
        epoch_iterator = self._epoch_iterator(
            distributed, steps, unused=reused, source=source, first=first, restarts=restarts
        )
        training = kind == "train"
        self._check_gradients(training)
        batch = self._build(epoch_iterator, distributed, kind)
        self._check_data(dataset, distributed, epoch_iterator)
        self._check_gradients(training)  # the batch may have created weights
        if training:
            with self._strategy.job.vote():
                model_checks.check_trained(self._model)
        if training and self._strategy.is_chief:
            self._warn_if_nothing_trains()
        if training:
            self._compiled.check_trained()
        if source is not None and reused is None:
            source.start(self._strategy.job.broadcast)
        self._study(batch, kind)
        return epoch_iterator, self._compiled.loop(kind, distributed)

    def _study(self, batch: Any, kind: str) -> None:
        """Study the model, unless it was studied for steps of this kind since it was compiled."""

        def study() -> None:
            splits_batch = self._engine.batch_parts[0] > 1 or self._engine.cuts_model
            with full_precision(), self.kernels():
                self._engine.study(self._model, data.varied_first(batch) if splits_batch else batch, kind)

        # Optional inputs may be None, and sparse inputs have sparse gradient rows.
        structure = str(tf.nest.map_structure(lambda leaf: None if leaf is None else type(leaf).__name__, batch))
        self._compiled.once(f"{kind} study", study, structure)

    def _warn_if_nothing_trains(self) -> None:
        if not any(weights for _, weights in objective.updates_of(self._model)):
            way_out = " Set `trainable` of its layers, and call compile() again." if self._model.weights else ""
            user_warnings.warn(
                f"{self._model.name!r} does not have any trainable weights: fit updates its metrics and states alone."
                + way_out
            )

    def _check_gradients(self, training: bool) -> None:
        measures_gradients = self._engine.scheduled is not None  # to balance stages, before the first step
        if measures_gradients or (training and self._engine.batch_parts[0] > 1):
            with self._strategy.job.vote():
                model_checks.check_gradients(self._model, self._strategy.describe())

    def evaluation(self, dataset: data.Batches, steps: int | None) -> tuple[EpochIterator, Any]:
        """Return what `prepare_loop` does for `evaluate`, after a broadcast of the chief's weights."""
        epoch_iterator, run_steps = self.prepare_loop(dataset, steps, "evaluate")
        initial_state.share_weights(self._model, self._strategy)
        return epoch_iterator, run_steps

    def predictions(self, dataset: data.Batches, steps: int | None) -> tuple[EpochIterator, Callable[[Any], Any]]:
        """Build the model, and return an iterator over a distributed dataset and the compiled prediction of a batch."""
        with self._strategy.job.vote():
            model_checks.check_steps(self._model, "predict", runs_own_steps=self._engine.runs_own_steps)
            batches = dataset.global_batches() if isinstance(dataset, data.Sharded) else dataset
            if not isinstance(self._strategy, SingleDevice):
                data.check_ranks(keras.utils.unpack_x_y_sample_weight(batches.element_spec)[0])
            distributed, source, first = self._distribute(batches)
        epoch_iterator = self._epoch_iterator(distributed, steps, source=source, first=first)
        self._check_gradients(training=False)
        batch = self._build(epoch_iterator, distributed, "predict")
        self._check_data(dataset, distributed, epoch_iterator)
        self._study(batch, "predict")
        initial_state.share_weights(self._model, self._strategy)
        return epoch_iterator, self._compiled.predict(distributed.dataset.element_spec)

    def _check_data(self, dataset: data.Batches, distributed: Distributed, epoch_iterator: EpochIterator) -> None:
        """Count the examples of the first batch, and raise an error if the data of workers differ."""
        epoch_iterator.batch_size = int(distributed.num_examples(epoch_iterator.peek()))
        equal_workers.check_data(self._strategy.job, dataset, epoch_iterator)
        if (digest := distributed.digest(epoch_iterator.peek())) is not None:
            self._read_order.note(0, [digest])
            self._read_order.compare(self._strategy.job.sum(self._read_order.summaries()))

    def _epoch_iterator(self, distributed: Distributed, steps: int | None, **settings: Any) -> EpochIterator:
        def check_end(end: str) -> None:
            self._strategy.job.require_equal({"the end of the data": end})

        return EpochIterator(
            distributed,
            steps,
            vote=self._strategy.job.vote,
            check_end=check_end if distributed.unknown_end else None,
            **settings,
        )

    def _distribute(
        self, dataset: data.Batches
    ) -> tuple[Distributed, data.PythonBatches | None, tf.data.Dataset | None]:
        """Return the distributed dataset and, for a Python source, this source and a dataset of its first element."""
        if not isinstance(dataset, data.Sharded):
            model_checks.check_batched(self._model, dataset.element_spec)
        if not isinstance(dataset, data.PythonBatches):
            return self._engine.distribute(dataset), None, None
        distribute = self._engine.distribute
        return distribute(dataset.dataset), dataset, distribute(dataset.first).dataset

    def batches(self, x: Any, y: Any = None, sample_weight: Any = None, **settings: Any) -> data.Batches:
        """Return `data.as_dataset(...)`; an error on one worker is raised on all."""
        with self._strategy.job.vote():
            return data.as_dataset(x, y, sample_weight, **settings)

    def _build(self, epoch_iterator: EpochIterator, distributed: Distributed, kind: str) -> Any:
        with self._strategy.job.vote():
            batch = distributed.local_batch(epoch_iterator.peek())
            inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
            model_checks.check_inputs(self._model, inputs)
            if kind != "predict":
                model_checks.check_targets(self._model, targets)
        # Workers with different shapes would create different variables and deadlock.
        spec = distributed.dataset.element_spec if distributed.spec is None else distributed.spec
        self._strategy.job.require_equal({"the shapes of the data": _shapes(spec)})
        self._engine.move_model(self._model)  # the user may have compiled it again outside of the scope
        with self._strategy.job.vote(), self.kernels():
            has_run = own_steps.prepare(self._model, kind, batch)
        if has_run:
            self._engine.move_model(self._model)  # with what the step has created
        with self._strategy.job.vote(), self._engine.creation_scope():
            self._place(batch, kind)
            num_weights = len(self._model.variables)
            model_checks.build(self._model, batch, kind, self._engine.creating_slots)
        self._engine.move_model(self._model)  # building may have created metrics
        if len(self._model.variables) != num_weights:  # or layers in compute_loss
            with self._strategy.job.vote(), self._engine.creation_scope():
                self._place(batch, kind)
        keras_weight_placement.place_rest(self._model)
        return batch

    def _place(self, batch: Any, kind: str) -> None:
        with self.kernels():  # as a pipeline measures its layers here
            self._engine.place(self._model, batch, kind == "train")

    def caller(
        self,
        run_steps: StepLoop,
        epoch_iterator: EpochIterator,
        callbacks: DeferringCallbacks,
        steps_per_call: int | None = None,
        testing: bool = False,
    ) -> StepCalls:
        """Return a caller of a compiled loop over an iterator."""
        return StepCalls(run_steps, self._model, self._strategy, epoch_iterator, callbacks, steps_per_call, testing)

    def callback_list(
        self,
        callbacks: Any,
        verbose: int | str,
        epoch_iterator: EpochIterator,
        epochs: int = 1,
        add_history: bool = False,
    ) -> DeferringCallbacks:
        """Return the callbacks of one `fit`, `evaluate` or `predict`."""
        steps, is_chief = epoch_iterator.steps_per_epoch, self._strategy.is_chief
        with self._strategy.job.vote("A callback"):
            saves = saves_models(callbacks, self._engine.divides_state)
            worker_callbacks = callback_list(callbacks, self._model, is_chief, verbose, epochs, steps, add_history)
        if add_history:
            share_logs(worker_callbacks, self._strategy.job)
        return DeferringCallbacks(worker_callbacks, self._strategy, self._model if saves else None, self._read_order)

    def validation(
        self,
        validation_data: Any,
        batch_size: int | None,
        steps: int | None,
        frequency: int | Sequence[int],
        callbacks: DeferringCallbacks,
    ) -> Callable[[int], dict[str, float]]:
        """Return a function that validates after an epoch and returns the logs, empty if no validation is due.

        Raises:
            ValueError: If the frequency is neither a number of epochs nor a list of them.
        """
        if validation_data is None:
            return lambda epoch: {}
        lists_epochs = isinstance(frequency, Collection) and not isinstance(frequency, str)
        if not (frequency >= 1 if isinstance(frequency, int | np.integer) else lists_epochs):
            raise ValueError(
                f"validation_freq must be a number of epochs of at least 1 or a list of epochs, received {frequency!r}."
            )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        steps = limited_steps(steps, "validation_steps")
        dataset = self.batches(x, y, sample_weight, batch_size=batch_size, steps=steps)
        epoch_iterator, run_steps = self.prepare_loop(dataset, steps, "evaluate", restarts=True)
        caller = self.caller(run_steps, epoch_iterator, callbacks, testing=True)

        def validate(epoch: int) -> dict[str, float]:
            due = epoch + 1 in frequency if isinstance(frequency, Collection) else (epoch + 1) % frequency == 0
            return {f"val_{name}": value for name, value in evaluate(caller).items()} if due else {}

        return validate


def _shapes(spec: Any) -> str:
    """Return a line with type and shape, without the batch size, for each tensor of an element."""
    leaves = keras.tree.flatten_with_path(spec)
    return "\n".join(f"{'/'.join(map(str, path))}: {_shape(leaf)}" for path, leaf in leaves)


def _shape(spec: Any) -> str:
    shape = getattr(spec, "shape", None)
    sizes = "" if shape is None else "unknown" if shape.rank is None else str(tuple(shape[1:]))
    dtype = getattr(spec, "dtype", None)
    return f"{type(spec).__name__} {'' if dtype is None else dtype.name} {sizes}"

"""The trainer: a Keras model, a strategy, and Keras' own verbs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpar import data, strategies
from tfpar._compat import keras_model
from tfpar.checkpoint import Checkpoints
from tfpar.files import atomic_file
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.evaluate_loop import evaluate, predict
from tfpar.loops.fit_loop import FitLoop, NonfiniteLoss
from tfpar.loops.model_function import ModelOrFunction, check_arguments, model_of
from tfpar.loops.preparation import Preparation
from tfpar.loops.step_calls import limited_epochs, limited_steps
from tfpar.messages import keyword_arguments
from tfpar.strategies import Strategy
from tfpar.strategies.preview import Preview

Verbose = int | str
Callbacks: TypeAlias = keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None


class Trainer:
    """Train a Keras model under a strategy, with the results of one device and the methods of `keras.Model`.

    Args:
        build_model: Returns a compiled `keras.Model`; runs inside the strategy's scope. Or a model that exists: it
            keeps its weights, optimizer state and random state, which move to the devices of the strategy.
        strategy: Where and how a step runs; None for `SingleDevice()`, or for the strategy under which a model that
            exists was built. A `tf.distribute.MirroredStrategy` or `MultiWorkerMirroredStrategy` counts as `Mirrored`
            or `MultiWorker`.
        seed: What `keras.utils.set_random_seed` gets before the model function runs, so that plain Keras with the
            same seed has the same weights; it also orders arrays given to `fit`. None sets nothing.

    Raises:
        TypeError: If an argument is of another kind, or the model function returns something else than a
            `keras.Model`.
        ValueError: If the model overrides a step of Keras' own trainer, which would never run, or holds variables
            that cannot move to the strategy's devices.

    Example:
        >>> trainer = tfpar.Trainer(build_model, tfpar.Mirrored(), seed=0)
        >>> history = trainer.fit(dataset, epochs=5, validation_data=validation)
        >>> trainer.save("model.keras")
    """

    @keyword_arguments.named
    def __init__(
        self,
        build_model: ModelOrFunction,
        strategy: Strategy | tf.distribute.Strategy | None = None,
        seed: int | None = 0,
    ) -> None:
        check_arguments(build_model, strategy, seed)
        exists = isinstance(build_model, keras.Model) and strategy is None
        self.strategy = strategies.strategy_of(build_model) if exists else strategies.resolve(strategy)
        self.seed = None if seed is None else int(seed)
        self.model = model_of(build_model, self.strategy, self.seed)
        self.model._tfpar_trainer = weakref.ref(self)  # what tfpar.fit runs on this model, while this trainer is there
        self.interrupted = False
        self._preparation = Preparation(self.model, self.strategy)
        self._begun: tuple[Any, EpochIterator] | None = None

    def interrupt(self) -> None:
        """Let `fit` stop after the steps that run now, write a checkpoint and return; meant for signal handlers."""
        self.interrupted = True

    def build(self, x: Any, y: Any = None, batch_size: int | None = None) -> Any:
        """Create and check with the first batch all that `fit` would before its first step.

        A `fit` on the same dataset then begins with that batch: a shuffled dataset has another order each time it is
        read, and looking ahead must not change what is trained on.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets where `x` is arrays.
            batch_size: Global batch of arrays; None for 32.

        Returns:
            The first global batch, as this worker has it.

        Raises:
            ValueError: As `fit`.
        """
        # A Python source is shuffled as fit shuffles by default: it can go on with this first look only if it is.
        shuffle = data.is_python_source(x)
        dataset = self._preparation.batches(
            self._looked_at(x, None, shuffle), y, batch_size=batch_size, shuffle=shuffle
        )
        stream, _ = self._preparation.stream(dataset, None, "train", self._begun)
        self._begun = (dataset, stream)
        return self.strategy.local_batch(stream.peek())

    def preview(self, x: Any, y: Any = None, batch_size: int | None = None) -> Preview:
        """Show what a step will be like, before anything trains: measured on the first batch, and computed from that.

        A notebook shows the result as text and picture. A `fit` on the same dataset trains as it would have without:
        weights, optimizer, random state and the order of a shuffled dataset stay as they are (with `class_weight` or
        another dataset object, a shuffled dataset is read again).

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets where `x` is arrays.
            batch_size: Global batch of arrays; None for 32.

        Returns:
            For a pipeline its stages, its step as predicted and the picture of its schedule; for other strategies the
            devices with their examples and memory.

        Raises:
            ValueError: As `fit`.

        Example:
            >>> preview = trainer.preview(dataset)
            >>> print(preview)
            >>> preview.save("schedule.png")
        """
        return self.strategy.preview(self.model, self.build(x, y, batch_size))

    def __repr__(self) -> str:
        """Return the model, the optimizer, the steps done and the strategy in a line."""
        model, optimizer = self.model, self.model.optimizer
        parameters = f"{model.count_params():,} parameters" if model.built else "parameters not yet counted"
        trained = ""
        if optimizer is not None:
            trained = f", {type(optimizer).__name__}, step {int(optimizer.iterations.numpy()):,}"
        return f"<Trainer of {model.name!r}, {parameters}{trained}, on {self.strategy.describe()}>"

    def compile(self, *arguments: Any, **settings: Any) -> None:
        """Compile the model again, as `keras.Model.compile` does: for another optimizer, loss or set of metrics.

        `trainer.model.compile(...)` does the same. As in Keras, what changes in the `trainable` attribute of a layer
        counts from the next compilation on, and an optimizer begins afresh.

        Args:
            *arguments: As for `compile` of the model, which is usually `keras.Model.compile`.
            **settings: As for `compile` of the model: `optimizer`, `loss`, `metrics` and so on.

        Example:
            >>> trainer.fit(dataset)  # the new layers
            >>> trainer.model.get_layer("base").trainable = True
            >>> trainer.compile(keras.optimizers.Adam(1e-5), "sparse_categorical_crossentropy")
            >>> trainer.fit(dataset)  # all layers
        """
        with self.strategy.scope():
            self.model.compile(*arguments, **settings)

    @keyword_arguments.named
    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        steps_per_call: int | None = None,
        checkpoints: Checkpoints | None = None,
        nonfinite_loss: NonfiniteLoss = "stop",
    ) -> keras.callbacks.History:
        """Train, as `keras.Model.fit` does.

        Args:
            x: A `tf.data.Dataset` of `(inputs, targets)` or `(inputs, targets, sample_weight)`, batched to the
                global batch; what yields such batches: a `keras.utils.PyDataset`, a generator, a torch `DataLoader`;
                or arrays `[examples, ...]` of any kind that Keras takes.
            y: Targets `[examples, ...]` where `x` is arrays.
            batch_size: Global batch of arrays; None for 32.
            epochs: The epoch at whose end training stops.
            verbose: 0 silent, 1 or "auto" a progress bar, 2 a line an epoch.
            callbacks: Keras callbacks: one, a list of them or a `keras.callbacks.CallbackList`. One that looks at
                batches makes every call run a single step.
            validation_split: Share of the arrays' last rows to validate on instead of training on them.
            validation_data: A dataset, or a tuple of arrays, evaluated after every `validation_freq` epochs.
            shuffle: Whether arrays are shuffled, in another order every epoch.
            class_weight: Weight of each class's examples in the loss.
            sample_weight: Weights `[examples, ...]` where `x` is arrays.
            initial_epoch: Epoch at which to start.
            steps_per_epoch: Steps an epoch; None for one pass over the dataset.
            validation_steps: Steps a validation; None for all of its data.
            validation_batch_size: Global batch of arrays in validation; None for `batch_size`.
            validation_freq: Epochs from one validation to the next, or the epochs to validate after.
            steps_per_call: Steps of one call of the inner loop; None for about a tenth of a second's worth.
            checkpoints: Where to write checkpoints, and from which to resume if there are any.
            nonfinite_loss: "stop" raises after the step, or the validation, whose loss is not finite; "continue"
                trains on and reports it, as Keras does.

        Returns:
            The history of logs, one entry an epoch.

        Raises:
            ValueError: If data and model do not fit together, the strategy cannot honour the model exactly, or the
                model is not compiled.
            FloatingPointError: If the loss is no longer finite; the message names the step.
        """
        epochs, steps = limited_epochs(epochs), limited_steps(steps_per_epoch)
        if validation_split and validation_data is None:
            with self.strategy.together():
                (x, y, sample_weight), validation_data = data.hold_out((x, y, sample_weight), validation_split)
        x = self._looked_at(x, class_weight, shuffle)
        begun, self._begun = self._begun, None
        dataset = self._preparation.batches(
            x, y, sample_weight, batch_size=batch_size, steps=steps, shuffle=shuffle, seed=self.seed or 0,
            class_weight=class_weight,
        )  # fmt: skip
        stream, run_steps = self._preparation.stream(dataset, steps, "train", begun)
        listeners = self._preparation.listeners(callbacks, verbose, stream, epochs, add_history=True)
        self.interrupted = self.model.stop_training = False
        fit_loop = FitLoop(
            self._preparation.caller(run_steps, stream, listeners, steps_per_call),
            self._preparation.validation(
                validation_data, validation_batch_size or batch_size, validation_steps, validation_freq, listeners
            ),
            checkpoints,
            lambda: self.interrupted,
            nonfinite_loss,
        )
        with checkpoints or contextlib.nullcontext():
            logs = fit_loop.run(initial_epoch, epochs)
        stream.close()
        self.interrupted = fit_loop.was_interrupted
        if not self.interrupted and epochs > 0:
            self.strategy.finalize_weights(self.model)
        listeners.on_train_end(logs)
        return self.model.history

    def _looked_at(self, x: Any, class_weight: dict[int, float] | None, shuffle: bool) -> Any:
        """Return the batches of Python code at which `build` has looked, if they are those of `x`; else `x`."""
        looked_at = self._begun[0] if self._begun is not None else None
        if isinstance(looked_at, data.PythonBatches) and looked_at.is_made_of(x, class_weight, shuffle):
            return looked_at
        return x

    @keyword_arguments.named
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
    ) -> Any:
        """Compute loss and metrics, as `keras.Model.evaluate` does.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets where `x` is arrays.
            batch_size: Global batch of arrays; None for 32.
            verbose: 0 silent, 1 or "auto" a progress bar, 2 a line.
            sample_weight: Weights where `x` is arrays.
            steps: Number of batches; None for all.
            callbacks: Keras callbacks; one may set `model.stop_evaluating`.
            return_dict: Whether to return a dict by name instead of a list.

        Returns:
            The loss, or a list or dict of the loss and the metrics.

        Raises:
            ValueError: If the data are empty or do not fit the model.
        """
        steps = limited_steps(steps)
        dataset = self._preparation.batches(x, y, sample_weight, batch_size=batch_size, steps=steps)
        stream, run_steps = self._preparation.stream(dataset, steps, "evaluate")
        listeners = self._preparation.listeners(callbacks, verbose, stream)
        logs = evaluate(self._preparation.caller(run_steps, stream, listeners, testing=True))
        return logs if return_dict else keras_model.metrics_in_order(self.model, logs)

    @keyword_arguments.named
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
    ) -> Any:
        """Return the model's outputs `[examples, ...]` as NumPy arrays, in the order of the inputs.

        The model need not be compiled.

        Args:
            x: A dataset (targets are left aside) or arrays.
            batch_size: Global batch of arrays; None for 32.
            verbose: 0 silent, 1 or "auto" a progress bar, 2 a line.
            steps: Number of batches; None for all.
            callbacks: Keras callbacks; one may set `model.stop_predicting`.

        Raises:
            ValueError: If the data are empty or do not fit the model.
        """
        steps = limited_steps(steps)
        dataset = self._preparation.batches(x, batch_size=batch_size, steps=steps)
        stream, predict_batch = self._preparation.predictions(dataset, steps)
        listeners = self._preparation.listeners(callbacks, verbose, stream)
        return predict(self.model, self.strategy, stream, predict_batch, listeners)

    def save(self, path: str | Path) -> None:
        """Save the model as plain Keras, whole or not at all: it is written under another name and renamed.

        Over several workers the chief writes it.

        Args:
            path: A `.keras` file, loaded with `keras.models.load_model`, without tfpar.

        Raises:
            ValueError: If the name does not end with `.keras`.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        if path.suffix != ".keras":
            raise ValueError(f"The path must end with .keras, received {str(path)!r}. Name it {path.stem}.keras.")
        if not self.strategy.is_chief:
            return
        with atomic_file.new_by_path(path) as unfinished:
            self.model.save(unfinished)

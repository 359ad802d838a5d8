"""The trainer: the methods of `keras.Model`, run under a strategy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import keras
import tensorflow as tf

from tfpar import data, interruption, strategies
from tfpar._compat.models import keras_metrics
from tfpar._compat.variables import keras_weight_placement
from tfpar.checkpoint import Checkpoints
from tfpar.engines.preview import Preview
from tfpar.files import atomic_file
from tfpar.loops import model_methods
from tfpar.loops.agreement import equal_workers
from tfpar.loops.agreement.failure_reports import reported
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.evaluate_loop import evaluate, predict
from tfpar.loops.experiment_loggers import logged
from tfpar.loops.fit_loop import FitLoop, NonfiniteLoss
from tfpar.loops.model_function import ModelOrFunction, check_arguments, make_model
from tfpar.loops.preparation import Preparation
from tfpar.loops.step_calls import limited_epochs, limited_steps
from tfpar.messages import keyword_arguments
from tfpar.messages.reasons import message_of
from tfpar.strategies import Strategy
from tfpar.study.report import Study, own_step_rows, rows_of

Verbose = int | str
Callbacks: TypeAlias = keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None


class Trainer:
    """Train a Keras model under a strategy, with the methods of `keras.Model` and the results of one device.

    Args:
        build_model: A function that returns a compiled `keras.Model`; it is called in the strategy's scope. Or a model:
            its weights, optimizer state and random state are moved to the strategy's devices.
        strategy: The strategy. None: the strategy in whose scope the model was built, else `SingleDevice()`. "auto":
            `MultiWorker()` in a job of several workers, `Mirrored()` on several devices. A `tf.distribute` strategy is
            converted to `Mirrored` or `MultiWorker`.
        seed: Passed to `keras.utils.set_random_seed` before the model is built, so that plain Keras with the same seed
            creates the same weights; also the seed with which `fit` shuffles arrays. None sets no seed.
        fused: Whether steps use fused TensorFlow kernels where these match Keras' operations up to rounding.

    Raises:
        TypeError: If an argument has the wrong type, or `build_model` does not return a `keras.Model`.
        ValueError: If the strategy does not run a step that the model overrides, or cannot move its variables.

    Example:
        >>> trainer = tfpar.Trainer(build_model, tfpar.Mirrored(), seed=0)
        >>> history = trainer.fit(dataset, epochs=5, validation_data=validation)
        >>> trainer.save("model.keras")
    """

    @keyword_arguments.named
    def __init__(
        self,
        build_model: ModelOrFunction,
        strategy: Strategy | tf.distribute.Strategy | Literal["auto"] | None = None,
        seed: int | None = 0,
        *,
        fused: bool = True,
    ) -> None:
        check_arguments(build_model, strategy, seed, fused)
        exists = isinstance(build_model, keras.Model) and strategy is None
        self.strategy = strategies.strategy_of(build_model) if exists else strategies.resolve(strategy)
        self.seed = None if seed is None else int(seed)
        self.fused = fused
        self.model = make_model(build_model, self.strategy, self.seed)
        self.model._tfpar_trainer = weakref.ref(self)  # tfpar.fit uses this trainer while it exists
        self.interrupted = False
        self._preparation = Preparation(self.model, self.strategy, fused)
        self._built_with: tuple[Any, EpochIterator] | None = None
        model_methods.replace_methods(self)

    def interrupt(self) -> None:
        """Stop `fit` after the current call, with a checkpoint if it writes any; safe to call from a signal handler."""
        self.interrupted = True

    @reported
    def build(self, x: Any, y: Any = None, batch_size: int | None = None) -> Any:
        """Build the model from the first batch and run every check that `fit` makes before its first step.

        The next `fit` on the same dataset reuses this batch, so `build` does not change the order of the data.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets if `x` is arrays.
            batch_size: Global batch size for arrays. Defaults to 32.

        Returns:
            This worker's first batch.

        Raises:
            ValueError: As `fit`.
        """
        # Shuffle a Python source, the default of fit: fit reuses the batch only with the same argument.
        shuffle = data.is_python_source(x)
        source = self._reused_source(x, None, shuffle)
        dataset = self._preparation.batches(source, y, batch_size=batch_size, shuffle=shuffle)
        epoch_iterator, _ = self._preparation.prepare_loop(dataset, None, "train", self._built_with)
        self._built_with = (dataset, epoch_iterator)
        return epoch_iterator.distributed.local_batch(epoch_iterator.peek())

    def preview(self, x: Any, y: Any = None, batch_size: int | None = None) -> Preview:
        """Predict the time and memory of a training step from measurements on the first batch.

        Weights, optimizer state, random state and the order of the data stay as they are for the next `fit` on the
        same dataset object without `class_weight`. In a job, every worker must call this method.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets if `x` is arrays.
            batch_size: Global batch size for arrays. Defaults to 32.

        Returns:
            For a pipeline, the stages, the predicted step and a plot of the schedule; for other strategies, the
            examples and memory of each device. Notebooks display it as text and picture.

        Raises:
            ValueError: As `fit`.

        Example:
            >>> preview = trainer.preview(dataset)
            >>> print(preview)
            >>> preview.save("schedule.png")
        """
        batch = self.build(x, y, batch_size)
        with self._preparation.kernels():
            return self.strategy.preview(self.model, batch)

    def study(self, x: Any, y: Any = None, batch_size: int | None = None) -> Study:
        """Report how each loss, metric and layer state of a batch is computed from its micro-batches or replicas.

        `fit` makes the same study before its first step, and refuses a model that cannot be computed exactly. In a job,
        every worker must call this method.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets if `x` is arrays.
            batch_size: Global batch size for arrays. Defaults to 32.

        Returns:
            The study; `print` shows it as a table, or the reason if the model is refused.

        Example:
            >>> print(trainer.study(dataset))
        """
        title = f"{self.model.name!r} under {self.strategy.describe()}"
        try:
            self.build(x, y, batch_size)
        except ValueError as error:
            return Study(title, refusal=message_of(error))
        parts = self.strategy.engine.own_step(self.model)
        if parts is not None:
            return Study(title, tuple(own_step_rows(self.model, parts)))
        verdict = self.strategy.engine.verdict(self.model)
        if verdict is None:
            return Study(title, (("everything", "one device", "computes the whole batch"),))
        return Study(title, tuple(rows_of(self.model, verdict)), verdict)

    def __repr__(self) -> str:
        """Return the model, the optimizer, its step and the strategy on one line."""
        model, optimizer = self.model, self.model.optimizer
        parameters = f"{model.count_params():,} parameters" if model.built else "parameters not yet counted"
        step = "" if optimizer is None else f", {type(optimizer).__name__}, step {int(optimizer.iterations.numpy()):,}"
        kernels = "" if self.fused else ", without fused kernels"
        return f"<Trainer of {model.name!r}, {parameters}{step}, on {self.strategy.describe()}{kernels}>"

    def compile(self, *arguments: Any, **settings: Any) -> None:
        """Compile the model again, as `keras.Model.compile` does.

        As in Keras, a change of `trainable` takes effect here, and a new optimizer starts without state.
        `trainer.model.compile` does the same.

        Args:
            *arguments: Positional arguments of the model's `compile`.
            **settings: Keyword arguments of the model's `compile`, such as `optimizer`, `loss` and `metrics`.

        Example:
            >>> trainer.fit(dataset)  # trains the new layers
            >>> trainer.model.get_layer("base").trainable = True
            >>> trainer.compile(keras.optimizers.Adam(1e-5), "sparse_categorical_crossentropy")
            >>> trainer.fit(dataset)  # trains all layers
        """
        with self.strategy.engine.creation_scope():
            self.model.compile(*arguments, **settings)

    @keyword_arguments.named
    @logged
    @reported
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
        """Train the model, as `keras.Model.fit` does.

        Args:
            x: A `tf.data.Dataset` of `(inputs, targets)` or `(inputs, targets, sample_weight)`, batched to the
                global batch size; a `keras.utils.PyDataset`, generator or torch `DataLoader` of such batches; or
                arrays `[examples, ...]` of any type that Keras accepts.
            y: Targets `[examples, ...]` if `x` is arrays.
            batch_size: Global batch size for arrays. Defaults to 32.
            epochs: Epoch at which training stops; `epochs - initial_epoch` epochs run.
            verbose: 0: silent. 1 or "auto": progress bar. 2: one line per epoch.
            callbacks: A callback, a list of callbacks or a `keras.callbacks.CallbackList`. If a callback has batch
                hooks, each call of the compiled loop runs a single step.
            validation_split: Fraction of the arrays, taken from their end, to use for validation only.
            validation_data: A dataset, or a tuple of arrays, on which to evaluate.
            shuffle: Whether to shuffle arrays before each epoch.
            class_weight: Weight in the loss of the examples of each class.
            sample_weight: Weights `[examples, ...]` if `x` is arrays.
            initial_epoch: Epoch at which to start.
            steps_per_epoch: Steps per epoch. None: one pass over the dataset.
            validation_steps: Steps per validation. None: all validation data.
            validation_batch_size: Global batch size for arrays in validation. Defaults to `batch_size`.
            validation_freq: Number of epochs between validations, or a list of epochs after which to validate.
            steps_per_call: Steps per call of the compiled loop. None: as many as take about 0.1 s.
            checkpoints: Where to write checkpoints, also on Ctrl-C. Training resumes from the newest one.
            nonfinite_loss: "stop": raise after a step or validation whose loss is not finite. "continue": train on, as
                Keras does.

        Returns:
            The history, with one entry per epoch.

        Raises:
            ValueError: If the model is not compiled, the data do not fit it, or the strategy cannot train it with the
                results of one device.
            FloatingPointError: If the loss is not finite; the message names the step.
            KeyboardInterrupt: After Ctrl-C.
            SystemExit: With `checkpoints`, after SIGTERM or if another worker was stopped.
        """
        epochs, steps = limited_epochs(epochs), limited_steps(steps_per_epoch, "steps_per_epoch")
        equal_workers.check_fit(
            self.strategy.job, epochs=epochs, shuffle=shuffle, checkpoints=bool(checkpoints),
            class_weight=class_weight, validation=(validation_data is None, validation_split, validation_freq),
        )  # fmt: skip
        if validation_split and validation_data is None:
            with self.strategy.job.vote():
                (x, y, sample_weight), validation_data = data.hold_out((x, y, sample_weight), validation_split)
        x = self._reused_source(x, class_weight, shuffle)
        built_with, self._built_with = self._built_with, None
        dataset = self._preparation.batches(
            x, y, sample_weight, batch_size=batch_size, steps=steps, shuffle=shuffle, seed=self.seed or 0,
            class_weight=class_weight,
        )  # fmt: skip
        epoch_iterator, run_steps = self._preparation.prepare_loop(dataset, steps, "train", built_with)
        callback_list = self._preparation.callback_list(callbacks, verbose, epoch_iterator, epochs, add_history=True)
        self.interrupted = self.model.stop_training = False
        fit_loop = FitLoop(
            self._preparation.caller(run_steps, epoch_iterator, callback_list, steps_per_call),
            self._preparation.validation(
                validation_data, validation_batch_size or batch_size, validation_steps, validation_freq, callback_list
            ),
            checkpoints, lambda: self.interrupted, nonfinite_loss, self.seed, verbose != 0,
        )  # fmt: skip
        unhandled = interruption.unhandled() if checkpoints else []
        with checkpoints or contextlib.nullcontext(), interruption.interruptible(self, unhandled) as signals:
            logs = fit_loop.run(initial_epoch, epochs)
        epoch_iterator.close()
        self.interrupted = fit_loop.was_interrupted
        if not self.interrupted and epochs > 0:
            self.strategy.engine.finalize_weights(self.model)
        callback_list.on_train_end(logs)
        (is_signalled,) = callback_list.errors.vote([float(bool(signals))])
        equal_workers.check_weights(self.strategy.job, self.model)
        if is_signalled:
            interruption.end(signals)
        return self.model.history

    def _reused_source(self, x: Any, class_weight: dict[int, float] | None, shuffle: bool) -> Any:
        """Return the Python source that `build` made from `x`, whose first batch is already read; else `x`."""
        unused_source = self._built_with[0] if self._built_with is not None else None
        if isinstance(unused_source, data.PythonBatches) and unused_source.is_made_of(x, class_weight, shuffle):
            return unused_source
        return x

    @keyword_arguments.named
    @reported
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
        """Return the loss and metrics of the model, as `keras.Model.evaluate` does.

        Args:
            x: A dataset or arrays, as for `fit`.
            y: Targets if `x` is arrays.
            batch_size: Global batch size for arrays. Defaults to 32.
            verbose: 0: silent. 1 or "auto": progress bar. 2: one line.
            sample_weight: Weights if `x` is arrays.
            steps: Number of batches. None: all.
            callbacks: Keras callbacks. A callback may set `model.stop_evaluating`.
            return_dict: Whether to return a dict instead of a list.

        Returns:
            The loss, or a list or dict of the loss and metrics.

        Raises:
            ValueError: If the data are empty or do not fit the model.
        """
        steps = limited_steps(steps)
        dataset = self._preparation.batches(x, y, sample_weight, batch_size=batch_size, steps=steps)
        epoch_iterator, run_steps = self._preparation.evaluation(dataset, steps)
        callback_list = self._preparation.callback_list(callbacks, verbose, epoch_iterator)
        logs = evaluate(self._preparation.caller(run_steps, epoch_iterator, callback_list, testing=True))
        return logs if return_dict else keras_metrics.metrics_in_order(self.model, logs)

    @keyword_arguments.named
    @reported
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
            x: Arrays, or a dataset; its targets are ignored.
            batch_size: Global batch size for arrays. Defaults to 32.
            verbose: 0: silent. 1 or "auto": progress bar. 2: one line.
            steps: Number of batches. None: all.
            callbacks: Keras callbacks. A callback may set `model.stop_predicting`.

        Raises:
            ValueError: If the data are empty or do not fit the model.
        """
        steps = limited_steps(steps)
        dataset = self._preparation.batches(x, batch_size=batch_size, steps=steps)
        epoch_iterator, predict_batch = self._preparation.predictions(dataset, steps)
        callback_list = self._preparation.callback_list(callbacks, verbose, epoch_iterator)
        return predict(self.model, self.strategy, epoch_iterator, predict_batch, callback_list)

    def save(self, path: str | Path) -> None:
        """Save the model as a `.keras` file, which `keras.models.load_model` loads without tfpar.

        The file is written atomically. In a job, the chief writes it; every worker must call this method if the
        optimizer state is sharded.

        Args:
            path: The file; an existing one is replaced.

        Raises:
            ValueError: If the name does not end with `.keras`.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        if path.suffix != ".keras":
            raise ValueError(f"The path must end with .keras, received {str(path)!r}. Name it {path.stem}.keras.")
        with self.strategy.engine.whole_state(self.model, path.absolute().parent):
            if self.strategy.is_chief:
                with atomic_file.new_by_path(path) as unfinished:
                    self.model.save(unfinished)

    def export(self, path: str | Path, format: str = "tf_saved_model", **settings: Any) -> None:
        """Export the model for inference, as `keras.Model.export` does, with the weights of one device.

        In a job, every worker must call this method, and the chief writes.

        Args:
            path: A folder for a SavedModel, else a file.
            format: A format of `keras.Model.export`, such as "tf_saved_model", "onnx" or "litert".
            **settings: As for `keras.Model.export`, such as `verbose` and `input_signature`.

        Raises:
            ImportError: If a package for the format is not installed.
            ValueError: If the model is not built, or the format is unknown.
            OSError: If the files cannot be written.

        Example:
            >>> trainer.export("exported")
            >>> trainer.export("model.tflite", format="litert")
        """
        with self.strategy.job.vote("The export"):
            if self.strategy.is_chief:
                with keras_weight_placement.on_default_device(self.model.variables):
                    self.model.export(path, format=format, **settings)

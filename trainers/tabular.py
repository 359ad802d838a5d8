"""A multilayer perceptron or a linear model for tables.

The preprocessing consists of Keras layers. During training it runs in the input pipeline, as Keras recommends, since
strings cannot be sent to GPUs or between stages. The saved model contains it, and so takes raw columns.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar import config, data
from tfpar.data.sources.split import Column
from tfpar.files import atomic_file
from tfpar.messages import received
from tfpar.trainers import recipe


class Tabular(tfpar.Trainer):
    """Train a classifier, or a regression if labels are numbers, on the rows of a run.

    Args:
        run: The run.
        strategy: The strategy.

    Raises:
        ValueError: If the model of the run is neither "mlp" nor "linear", or its examples are not rows.

    Example:
        >>> from pathlib import Path
        >>> from tfpar.trainers import samples
        >>> samples.write_breast_cancer(Path("samples/breast_cancer"))
        >>> trainer = Tabular(config.load("configs/table.toml"), tfpar.SingleDevice())
        >>> trainer.fit(trainer.train_data, epochs=2, validation_data=trainer.validation_data)
    """

    reads = (*recipe.READS, "model.num_blocks", "model.width")

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        if run.model.name not in ("mlp", "linear"):
            raise ValueError(
                f'tfpar.trainers.tabular.Tabular builds model.name = "mlp" or "linear", received '
                f"{received.toml(run.model.name)}: set one of them, or use another trainer."
            )
        if run.model.name == "linear":
            _check_linear(run.model)
        keras.utils.set_random_seed(run.seed)
        loaded = data.load(run.data, global_batch_size=run.training.global_batch_size, seed=run.seed)
        if loaded.columns is None and (len(loaded.input_shape) != 1 or run.data.source == "python_source"):
            raise ValueError(
                f"tfpar.trainers.tabular.Tabular takes rows [columns] of numbers, received inputs of shape "
                f'{loaded.input_shape} from data.source = "{run.data.source}": read other data, or use another trainer.'
            )
        self.train_data, self.validation_data = loaded.train, loaded.validation
        self.num_train_examples, self.sharding = loaded.num_train_examples, loaded.sharding
        self.class_names, self.columns = loaded.class_names, loaded.columns
        recipe.set_precision(run.training.precision)
        self.preprocessing: keras.Model | None = None
        row_shape = loaded.input_shape
        if loaded.columns is not None:
            with tf.device("CPU:0"):
                self.preprocessing = build_preprocessing(loaded.columns, run.data.missing_value)
            row_shape = self.preprocessing.output_shape[1:]
            self.train_data = _preprocessed(loaded.train, self.preprocessing)
            if loaded.validation is not None:
                self.validation_data = _preprocessed(loaded.validation, self.preprocessing)
        model_function = functools.partial(build_model, run, row_shape, loaded.num_classes)
        super().__init__(model_function, strategy, run.seed, fused=run.training.fused)

    def save(self, path: str | Path) -> None:
        """Save the model together with the preprocessing, so that it takes raw columns by name.

        Args:
            path: As for `tfpar.Trainer.save`.
        """
        if self.preprocessing is None:
            super().save(path)
            return
        with self.strategy.engine.whole_state(self.model, Path(path).absolute().parent):
            if self.strategy.is_chief:
                with tempfile.TemporaryDirectory() as folder, tf.device("CPU:0"):
                    trained_path = Path(folder, "trained.keras")
                    super().save(trained_path)
                    whole = _with_preprocessing(keras.models.load_model(trained_path), self.preprocessing)
                with atomic_file.new_by_path(Path(path)) as unfinished:
                    whole.save(unfinished)


def _preprocessed(batches: Any, preprocessing: keras.Model) -> Any:
    preprocessed = batches.map(lambda columns, labels: (preprocessing(columns), labels))
    return preprocessed.prefetch(tf.data.AUTOTUNE) if isinstance(batches, tf.data.Dataset) else preprocessed


def _with_preprocessing(trained: keras.Model, preprocessing: keras.Model) -> keras.Model:
    """Return a model of raw columns, compiled like the trained model and with its optimizer."""
    # The inner model gets no optimizer, as Keras does not save an optimizer that two models share.
    network = keras.Model(trained.inputs, trained.outputs, name=trained.name)
    model = keras.Model(preprocessing.input, network(preprocessing(preprocessing.input)))
    model.compile(trained.optimizer, trained.loss, metrics=_metrics(trained.output_shape[-1] == 1))
    return model


def build_preprocessing(columns: Sequence[Column], missing_value: float | None = None) -> keras.Model:
    """Build the preprocessing of a table: scaled numbers and one-hot vectors, concatenated.

    Categories that no training row has share the first entry of their vector.

    Args:
        columns: The input columns, with statistics of the training rows.
        missing_value: The number that replaces NaN. None: leave NaN.

    Returns:
        A model without weights from `{name: [batch, 1]}` to rows `[batch, channels]`: all numbers, then all vectors, in
        the order of the columns.

    Example:
        >>> columns = [Column("x", "float32", mean=1.0, variance=4.0), Column("color", "string", vocabulary=("blue",))]
        >>> rows = {"x": tf.constant([[3.0]]), "color": tf.constant([["blue"]])}
        >>> build_preprocessing(columns)(rows).numpy().tolist()
        [[1.0, 0.0, 1.0]]
    """
    floatx = keras.config.floatx()  # not the compute dtype, as large numbers do not fit into float16
    inputs = {column.name: keras.Input((1,), dtype=column.dtype, name=_input_name(column)) for column in columns}
    numbers = [column for column in columns if column.vocabulary is None]
    encoded = [_one_hot(column, inputs[column.name]) for column in columns if column.vocabulary is not None]
    if numbers:
        rows = _joined([inputs[column.name] for column in numbers])
        if missing_value is not None:
            rows = keras.ops.where(keras.ops.isnan(rows), missing_value, rows)
        mean, variance = ([getattr(column, moment) for column in numbers] for moment in ("mean", "variance"))
        encoded.insert(0, keras.layers.Normalization(mean=mean, variance=variance, dtype=floatx)(rows))
    return keras.Model(inputs, _joined(encoded), name="preprocessing")


def _input_name(column: Column) -> str | None:
    """Return the name of a column, or None if it is invalid or taken by another layer of the saved model."""
    return None if "/" in column.name or column.name in ("preprocessing", "mlp", "linear") else column.name


def _one_hot(column: Column, cells: Any) -> Any:
    vocabulary = list(column.vocabulary or ())
    if column.dtype == "string":
        return keras.layers.StringLookup(vocabulary=vocabulary, output_mode="one_hot")(cells)
    unknown = np.iinfo(np.int64).min  # not Keras' default -1, which may occur in a column
    return keras.layers.IntegerLookup(vocabulary=vocabulary, oov_token=unknown, output_mode="one_hot")(cells)


def _joined(tensors: Sequence[Any]) -> Any:
    return keras.layers.Concatenate(dtype=keras.config.floatx())(tensors) if len(tensors) > 1 else tensors[0]


def build_model(run: config.Run, row_shape: tuple[int, ...], num_classes: int | None) -> keras.Model:
    """Build and compile the model of a run.

    Args:
        run: The run, whose `model`, `optimizer` and `training` sections are read.
        row_shape: `(columns,)`.
        num_classes: Number of classes; None for a regression.

    Returns:
        A compiled model from `[batch, columns]` to logits `[batch, num_classes]`, or to numbers `[batch, 1]`.
    """
    penalty = recipe.build_penalty(run.model)
    rows = keras.Input(row_shape, name="row")
    features = rows
    for index in range(run.model.num_blocks if run.model.name == "mlp" else 0):
        features = keras.layers.Dense(
            run.model.width, activation="relu", kernel_regularizer=penalty, name=f"hidden_{index}"
        )(features)
    if run.model.dropout:
        features = keras.layers.Dropout(run.model.dropout)(features)
    # Logits in float32: a softmax in half precision loses small probabilities.
    dtype = "float32" if run.training.precision.startswith("mixed_") else None
    name = "number" if num_classes is None else "logits"
    outputs = keras.layers.Dense(num_classes or 1, kernel_regularizer=penalty, dtype=dtype, name=name)(features)
    model = keras.Model(rows, outputs, name=run.model.name)
    loss = "mse" if num_classes is None else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        recipe.build_optimizer(run), loss, metrics=_metrics(num_classes is None), jit_compile=run.training.jit_compile
    )
    return model


def _metrics(is_regression: bool) -> list[str]:
    return ["mae" if is_regression else "accuracy"]


def _check_linear(settings: config.Model) -> None:
    for key in ("num_blocks", "width"):
        value = getattr(settings, key)
        if value != type(settings).model_fields[key].default:
            raise ValueError(
                f'model.{key} = {value} is a setting of "mlp", received model.name = "linear": leave it out, or set '
                '"mlp".'
            )

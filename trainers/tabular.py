"""Tables: a perceptron with hidden layers, or a linear model, for the columns of CSV and Parquet files."""

from __future__ import annotations

import functools

import keras

import tfpar
from tfpar import config, data
from tfpar.messages import received
from tfpar.trainers import recipe


class Tabular(tfpar.Trainer):
    """Train a model of the rows of the section `data`: a classifier if labels are classes, else a regression.

    Args:
        run: The run.
        strategy: Where and how a step runs.

    Raises:
        ValueError: If the run asks for another model than "mlp" or "linear", or its examples are no rows.

    Example:
        >>> from pathlib import Path
        >>> from tfpar.trainers import samples
        >>> samples.write_breast_cancer(Path("samples/breast_cancer"))
        >>> trainer = Tabular(config.load("configs/csv.toml"), tfpar.SingleDevice())
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
        if len(loaded.input_shape) != 1 or run.data.source == "python_source":
            raise ValueError(
                f"tfpar.trainers.tabular.Tabular takes rows [columns] of numbers, received inputs of shape "
                f'{loaded.input_shape} from data.source = "{run.data.source}": read other data, or use another trainer.'
            )
        self.train_data, self.validation_data = loaded.train, loaded.validation
        self.num_train_examples, self.sharding = loaded.num_train_examples, loaded.sharding
        self.class_names, self.vocabularies = loaded.class_names, loaded.vocabularies
        recipe.set_precision(run.training.precision)
        build = functools.partial(build_model, run, loaded.input_shape, loaded.num_classes)
        super().__init__(build, strategy, run.seed)


def build_model(run: config.Run, row_shape: tuple[int, ...], num_classes: int | None) -> keras.Model:
    """Build and compile the model of a run.

    Args:
        run: The run; its `model`, `optimizer` and `training` sections are read.
        row_shape: `(columns,)` of one row.
        num_classes: Number of classes; None for one number to predict.

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
    # Full precision: a softmax over half-precision numbers loses the small ones.
    dtype = "float32" if run.training.precision.startswith("mixed_") else None
    name = "number" if num_classes is None else "logits"
    outputs = keras.layers.Dense(num_classes or 1, kernel_regularizer=penalty, dtype=dtype, name=name)(features)
    model = keras.Model(rows, outputs, name=run.model.name)
    loss = "mse" if num_classes is None else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["mae"] if num_classes is None else ["accuracy"]
    model.compile(recipe.build_optimizer(run), loss, metrics=metrics, jit_compile=run.training.jit_compile)
    return model


def _check_linear(settings: config.Model) -> None:
    for key in ("num_blocks", "width"):
        value = getattr(settings, key)
        if value != type(settings).model_fields[key].default:
            raise ValueError(
                f'model.{key} = {value} is a setting of "mlp", received model.name = "linear": leave it out, or set '
                '"mlp".'
            )

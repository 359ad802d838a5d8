"""Linear regression on rows of numbers, which may be generated while they are read."""

from __future__ import annotations

import functools

import keras

import tfpar
from tfpar import config, data
from tfpar.messages.received import quoted
from tfpar.trainers import recipe


class Regression(tfpar.Trainer):
    """Fit a linear model to the rows of a run.

    Args:
        run: The run.
        strategy: The strategy.

    Raises:
        ValueError: If the model of the run is not "linear", or its data are not rows with a number to predict.

    Example:
        >>> trainer = Regression(config.load("configs/regression_small.toml"), tfpar.SingleDevice())
        >>> trainer.fit(trainer.train_data, epochs=1)
    """

    reads = recipe.READS

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        if run.model.name != "linear":
            raise ValueError(
                f'tfpar.trainers.regression.Regression builds model.name = "linear" only, received '
                f'{quoted(run.model.name)}. Set model.name = "linear".'
            )
        keras.utils.set_random_seed(run.seed)
        loaded = data.load(run.data, global_batch_size=run.training.global_batch_size, seed=run.seed)
        if len(loaded.input_shape) != 1 or run.data.source == "python_source":
            raise ValueError(
                f"Regression takes rows [features] of one number each to predict, received inputs of shape "
                f'{loaded.input_shape} from data.source = "{run.data.source}". Set data.source = "generated", or use '
                "another trainer."
            )
        if loaded.num_classes is not None:
            raise ValueError(
                f"Regression predicts numbers, received labels of {loaded.num_classes} classes. Leave data.num_classes "
                "and data.class_names out, or use tfpar.trainers.tabular.Tabular."
            )
        self.train_data, self.validation_data = loaded.train, loaded.validation
        self.num_train_examples, self.sharding = loaded.num_train_examples, loaded.sharding
        recipe.set_precision(run.training.precision)
        model_function = functools.partial(build_model, run, loaded.input_shape)
        super().__init__(model_function, strategy, run.seed, fused=run.training.fused)


def build_model(run: config.Run, row_shape: tuple[int, ...]) -> keras.Model:
    """Build and compile y = x w + b with a squared loss.

    Args:
        run: The run, whose `model`, `optimizer` and `training` sections are read.
        row_shape: `(features,)`.

    Returns:
        A compiled model from `[batch, features]` to `[batch, 1]`.
    """
    rows = keras.Input(row_shape, name="row")
    features = keras.layers.Dropout(run.model.dropout)(rows) if run.model.dropout else rows
    dtype = "float32" if run.training.precision.startswith("mixed_") else None
    outputs = keras.layers.Dense(1, kernel_regularizer=recipe.build_penalty(run.model), dtype=dtype, name="linear")(
        features
    )
    model = keras.Model(rows, outputs, name="linear")
    model.compile(recipe.build_optimizer(run), "mse", metrics=["mae"], jit_compile=run.training.jit_compile)
    return model

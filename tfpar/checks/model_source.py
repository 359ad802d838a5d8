"""The model that a user has named for the doctor: by a configuration, or by a model function."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.checks import users_module
from tfpar.messages.received import quoted


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model with its data and its strategy.

    Attributes:
        configuration: A configuration file; None for a model function.
        overrides: Settings `key=value` of the configuration; with a model function, those of its strategy.
        function: The model function, as "file.py:function" or "package.module:function".
        data: A function without arguments that returns a dataset, in the same form; empty to make up a batch.
        batch: A file with a pickled batch; empty without one.
    """

    configuration: str | None = None
    overrides: tuple[str, ...] = ()
    function: str = ""
    data: str = ""
    batch: str = ""

    def run(self) -> config.Run:
        """Return the run of the configuration; with a model function, only its strategy counts.

        Raises:
            ValueError: If a setting is wrong, or has no effect on the model function.
        """
        others = [one for one in self.overrides if self.function and not one.startswith("strategy.")]
        if others:
            raise ValueError(
                f"With a model function only settings of strategy can be changed, received {quoted(others[0])}. Leave "
                "it out, or name a configuration instead."
            )
        return config.load(self.configuration, self.overrides)


def source_of(described: dict[str, Any]) -> ModelSource:
    """Return a source from its fields, as JSON has them."""
    return ModelSource(**{**described, "overrides": tuple(described["overrides"])})


def function_of(name: str) -> Callable[[], Any]:
    """Import a function.

    Args:
        name: As "file.py:function" or "package.module:function".

    Raises:
        ValueError: If there is no such function.
        RuntimeError: If its file trains, or calls the doctor, on import.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(
            f'A function is named as "file.py:function" or "package.module:function", received {quoted(name)}.'
        )
    found = getattr(users_module.imported(place), attribute, None)
    if not callable(found):
        raise ValueError(f"{quoted(place)} has no function {quoted(attribute)}.")
    function: Callable[[], Any] = found
    return function


def make_trainer(source: ModelSource, strategy: Any, dtype: str | None) -> tuple[Any, Any]:
    """Return a trainer of the model under a strategy, and a dataset of its batches.

    Args:
        source: The model.
        strategy: The strategy.
        dtype: The float type of the model; None for the user's own.
    """
    import keras

    import tfpar
    from tfpar.config import settings_read
    from tfpar.runs import run_data, user_trainer
    from tfpar.strategies import model_checks

    for function in filter(None, (source.function, source.data)):
        function_of(function)  # a script may set a float type of its own
    if dtype is not None:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)  # a trainer without a seed has the same weights under each strategy
    if source.function:
        trainer: Any = tfpar.Trainer(function_of(source.function), strategy, seed=0)
        model_checks.check_compiled(trainer.model, "fit")
        return trainer, _data_of_function(source, trainer.model)
    run = source.run()
    reads_precision = "training.precision" in settings_read.read_keys(user_trainer.trainer_reads(run))
    if dtype is not None and reads_precision:
        run = run.model_copy(update={"training": run.training.model_copy(update={"precision": dtype})})
    trainer = user_trainer.make_trainer(run, strategy)
    return trainer, run_data.training_batches(run, trainer)


def first_batch(dataset: Any) -> Any:
    """Return the first batch of a dataset as NumPy arrays, in its structure."""
    import tensorflow as tf

    from tfpar import data

    batches = data.as_dataset(*dataset) if isinstance(dataset, tuple) else data.as_dataset(dataset)
    batch = next(iter(data.without_autotuning(data.global_batches(batches))), None)
    if batch is None:
        raise ValueError("The data are empty.")
    return tf.nest.map_structure(lambda tensor: None if tensor is None else tensor.numpy(), batch)


def _data_of_function(source: ModelSource, model: Any) -> Any:
    import tensorflow as tf

    if source.batch:
        return tf.data.Dataset.from_tensors(pickle.loads(Path(source.batch).read_bytes()))
    if source.data:
        return function_of(source.data)()
    return tf.data.Dataset.from_tensors(_made_up_batch(model))


def _made_up_batch(model: Any, num_examples: int = 8) -> Any:
    """Return inputs of the model's shapes, and targets of the first kind that its losses accept."""
    import keras
    import numpy as np

    if not getattr(model, "inputs", None):
        raise ValueError("The model does not say the shapes of its inputs: name its data, too, with --data.")
    generator = np.random.default_rng(0)

    def values(tensor: Any) -> Any:
        shape = [num_examples, *(size or 8 for size in tensor.shape[1:])]
        if keras.backend.is_float_dtype(tensor.dtype):
            return generator.normal(size=shape).astype(tensor.dtype)
        return generator.integers(0, 2, size=shape).astype(tensor.dtype)

    # A Sequential model has no `input` before its first call.
    structure = model.inputs[0] if len(model.inputs) == 1 else model.input
    inputs = keras.tree.map_structure(values, structure)
    outputs = keras.tree.map_structure(np.asarray, model(inputs))
    for of_output in (_like, _classes):
        with contextlib.suppress(Exception):
            targets = keras.tree.map_structure(of_output, outputs)
            if np.isfinite(float(model.compute_loss(inputs, targets, model(inputs)))):
                return inputs, targets
    raise ValueError("No made-up targets suit the model's loss: name its data, too, with --data.")


def _like(output: Any) -> Any:
    import numpy as np

    return np.full(output.shape, 0.5, output.dtype)


def _classes(output: Any) -> Any:
    import numpy as np

    return np.zeros(output.shape[:-1], "int64")

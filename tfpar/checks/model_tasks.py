"""Model tests, run in subprocesses: one step of a user's model on a device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar import data
from tfpar.checks import doctor
from tfpar.checks.models import ModelSource
from tfpar.checks.processes import at_stage
from tfpar.config import settings_read
from tfpar.engines import model_checks
from tfpar.engines.one_device import forward_backward
from tfpar.engines.replicas.replica_engine import ABILITIES
from tfpar.full_precision import full_precision
from tfpar.messages.reasons import message_of
from tfpar.messages.received import quoted
from tfpar.reduction import objective
from tfpar.runs import run_data, user_trainer
from tfpar.study.report import rows_of
from tfpar.study.study import study

_NUM_STEPS = 3
_NUM_EXAMPLES, _FREE_SIZE = 8, 8  # of a made-up batch, and of its axes of unknown size


def step(device: str, source: ModelSource, dtype: str | None, start: Any) -> dict[str, Any]:
    """Run one step of a model on a device; without `start`, also return where it started and a study of the model."""
    at_stage("the model function")
    strategy = tfpar.SingleDevice(device)
    trainer, dataset = _trainer(source, strategy, dtype)
    model: keras.Model = trainer.model
    weights, batch = start or (None, first_batch(dataset))
    batch = _cast(batch, dtype)
    with strategy.engine.creation_scope():
        model_checks.build(model, batch, "train")
        weights = weights or model.get_weights()
        model.set_weights(weights)
    at_stage("a step of the model")
    with full_precision():
        loss, gradients = tf.function(lambda: one_step(model, batch, strategy), autograph=False)()
    return {
        "loss": float(loss),
        "gradients": {path: tf.convert_to_tensor(gradient).numpy() for path, gradient in gradients.items()},
        "num_weights": len(model.trainable_variables),
        "policy": model.dtype_policy.name,
        "start": (weights, batch) if start is None else None,
        "study": _study(model, batch) if start is None else None,
    }


def _study(model: keras.Model, batch: Any) -> tuple[bool, str]:
    """Return whether replicas can train a model, and the result of its study or the reason why not."""
    at_stage("the study of the model")
    if objective.objectives_of(model):
        return True, "objectives, each with a value for each row"
    tensors = tf.nest.map_structure(lambda value: None if value is None else tf.convert_to_tensor(value), batch)
    try:
        with full_precision():
            verdict, _ = study(model, data.varied_first(tensors), "train", ABILITIES)
    except ValueError as error:
        return False, message_of(error)
    return True, "; ".join(f"{name}: {finding}, {done}" for name, finding, done in rows_of(model, verdict))


def one_step(model: keras.Model, batch: Any, strategy: tfpar.SingleDevice) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the gradients; for a model with objectives, the loss of a step that updates its weights."""
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
    if objective.objectives_of(model):
        return strategy.engine.train_step(model, batch), {}
    with strategy.engine.creation_scope():
        loss, _, gradients = forward_backward(model, inputs, targets, weights)
    pairs = zip(model.trainable_variables, gradients, strict=True)
    return loss, {variable.path: gradient for variable, gradient in pairs if gradient is not None}


def _cast(batch: Any, dtype: str | None) -> Any:
    def cast(value: Any) -> Any:
        if value is None or dtype is None or not np.issubdtype(np.asarray(value).dtype, np.floating):
            return value
        return np.asarray(value).astype(dtype)

    return tf.nest.map_structure(cast, batch)


def _trainer(source: ModelSource, strategy: tfpar.Strategy, dtype: str | None) -> tuple[Any, Any]:
    """Return a trainer of a model under a strategy, and its dataset."""
    for name in filter(None, (source.function, source.data)):
        import_function(name)  # before the types are set: a script may set its own
    if dtype is not None:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)  # even without a seed, all devices must draw the same numbers
    if source.function:
        trainer: Any = tfpar.Trainer(import_function(source.function), strategy, seed=0)
        model_checks.check_compiled(trainer.model, "fit")
        if source.data:
            return trainer, import_function(source.data)()
        batch = _made_up_batch(trainer.model) if source.batch is None else source.batch
        return trainer, tf.data.Dataset.from_tensors(batch)
    run = source.run()
    if dtype is not None and "training.precision" in settings_read.read_keys(user_trainer.trainer_reads(run)):
        run = run.model_copy(update={"training": run.training.model_copy(update={"precision": dtype})})
    trainer = user_trainer.make_trainer(run, strategy)
    return trainer, run_data.training_batches(run, trainer)


def first_batch(dataset: Any) -> Any:
    """Return the first batch of a dataset as NumPy arrays."""
    batches = data.as_dataset(*dataset) if isinstance(dataset, tuple) else data.as_dataset(dataset)
    batch = next(iter(data.without_autotuning(data.global_batches(batches))), None)
    if batch is None:
        raise ValueError("The data are empty.")
    return tf.nest.map_structure(lambda tensor: None if tensor is None else tensor.numpy(), batch)


def _made_up_batch(model: keras.Model) -> Any:
    """Return random inputs of the model's shapes, and targets that its losses accept."""
    if not getattr(model, "inputs", None):
        raise ValueError("The model does not say the shapes of its inputs: name its data, too, with --data.")
    generator = np.random.default_rng(0)

    def values(tensor: Any) -> Any:
        shape = [_NUM_EXAMPLES, *(size or _FREE_SIZE for size in tensor.shape[1:])]
        if keras.backend.is_float_dtype(tensor.dtype):
            return generator.normal(size=shape).astype(tensor.dtype)
        return generator.integers(0, 2, size=shape).astype(tensor.dtype)

    # A Sequential model has no `input` before its first call.
    inputs = keras.tree.map_structure(values, model.inputs[0] if len(model.inputs) == 1 else model.input)
    outputs = keras.tree.map_structure(np.asarray, model(inputs))
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda output: np.full(output.shape, 0.5, output.dtype),  # of the outputs' shape
        lambda output: np.zeros(output.shape[:-1], "int64"),  # class numbers
    )
    for kind in kinds:
        with contextlib.suppress(Exception):
            targets = keras.tree.map_structure(kind, outputs)
            if np.isfinite(float(model.compute_loss(inputs, targets, model(inputs)))):
                return inputs, targets
    raise ValueError("No made-up targets suit the model's loss: name its data, too, with --data.")


def import_function(name: str) -> Callable[[], Any]:
    """Import a function, named as "file.py:function" or "package.module:function".

    Raises:
        ValueError: If there is no such function.
        RuntimeError: If its file trains, or calls the doctor, on import.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(
            f'A function is named as "file.py:function" or "package.module:function", received {quoted(name)}.'
        )
    function: Callable[[], Any] | None = getattr(_imported(place), attribute, None)
    if not callable(function):
        raise ValueError(f"{quoted(place)} has no function {quoted(attribute)}.")
    return function


@functools.cache  # once for the model function and the data
def _imported(place: str) -> Any:
    """Import a file or a module, ignoring its device and thread settings: TensorFlow already runs here."""
    with _without_settings_and_training(place):
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        # As if Python ran the script, except that its name is not "__main__", so that it does not train.
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(f"{path.stem}_of_user", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ValueError(f"There is no file {quoted(place)}.")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@contextlib.contextmanager
def _without_settings_and_training(place: str) -> Iterator[None]:
    """Refuse to train in this context, as a script without `if __name__ == "__main__":` does on import."""
    refusal = RuntimeError(
        f"The doctor imports {quoted(Path(place).name)} for its functions, and would train, or call the doctor, again. "
        'Put these calls under `if __name__ == "__main__":`.'
    )
    ignored = (
        (tf.config, ("set_logical_device_configuration", "set_visible_devices")),
        (tf.config.experimental, ("set_memory_growth", "set_virtual_device_configuration", "set_visible_devices")),
        (tf.config.threading, ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads")),
    )
    with contextlib.ExitStack() as stack:
        for owner, names in ignored:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, return_value=None))
        for owner, name in ((keras.Model, "fit"), (tfpar.Trainer, "fit"), (doctor, "examine")):
            stack.enter_context(mock.patch.object(owner, name, side_effect=refusal))
        yield

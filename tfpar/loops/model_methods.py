"""Replacements for the methods of a model in the scope of a strategy, with the results of one device.

Users call these methods in callbacks, or without a trainer. In the scope of a `tf.distribute` strategy, Keras' own
methods return the rows of every replica, fail for batches that replicas do not share evenly, or do not run in a job of
several workers. In the scope of other strategies, weights have no memory until a trainer places them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.models import keras_metrics, keras_model
from tfpar._compat.variables import keras_variables, keras_weight_placement
from tfpar.files import atomic_file
from tfpar.loops.agreement import barriers
from tfpar.loops.step_functions import StepFunctions
from tfpar.reduction import own_step
from tfpar.strategies import Strategy, model_scopes, strategy_of

_TRAINER_METHODS = ("fit", "evaluate", "predict")
# The methods for one batch, each with the method of a trainer that does the same.
_ON_BATCH = {"predict_on_batch": "predict", "test_on_batch": "evaluate", "train_on_batch": "fit"}
_METHODS = (*_TRAINER_METHODS, *_ON_BATCH)
_SAVING = ("save", "save_weights")
_ASSIGNING = ("load_weights", "set_weights")


class _Trainer(Protocol):
    model: keras.Model
    strategy: Strategy


def replace_methods(trainer: _Trainer) -> None:
    """Replace the methods of a trainer's model whose results would differ from those of one device.

    | Method               | In one process       | In a job of several workers             |
    |----------------------|----------------------|-----------------------------------------|
    | `fit`                | `trainer.fit`        | `trainer.fit`: all workers call it      |
    | `evaluate`           | `trainer.evaluate`   | `trainer.evaluate`: all workers call it |
    | `predict`            | `trainer.predict`    | Keras' own, by each worker for itself   |
    | `predict_on_batch`   | Keras' own, one copy | Keras' own, by each worker for itself   |
    | `test_on_batch`      | Keras' own           | `trainer.evaluate`: all workers call it |
    | `train_on_batch`     | Keras' own           | a step of `trainer.fit`: all call it    |
    | `get_metrics_result` | Keras' own           | the last logs, over all workers         |
    | `save`               | Keras' own           | Keras' own, written atomically          |
    | `save_weights`       | Keras' own           | Keras' own, written atomically          |

    A method stays if the user's class overrides it, or its step, unless replicas run that: then the methods for one
    batch are those of a trainer too, with the metrics of the batch. In one process, the methods of inner models, such
    as the encoder of an autoencoder, become those of a trainer of their own; methods for one batch are refused.

    Args:
        trainer: A trainer, which the model does not keep alive.
    """
    model, strategy = trainer.model, trainer.strategy
    for name in (*_METHODS, *_SAVING, "get_metrics_result"):
        vars(model).pop(name, None)  # of an earlier trainer
    if strategy.num_workers > 1:
        _set_methods(model, {name: functools.partial(_save_atomically, model, name) for name in _SAVING})
    for inner in _inner_models(model):
        _replace_inner(inner, type(trainer), replaces=keras_model.is_in_scope(model) and strategy.num_workers == 1)
    if not keras_model.is_in_scope(model):
        if model_scopes.noted_strategy(model) is not None:
            _set_methods(model, _trainer_methods(model, type(trainer)))
        return
    replacements = _trainer_methods(model, type(trainer))
    local_methods = _local_methods(model, strategy)
    replacements["predict_on_batch"] = local_methods["predict_on_batch"]
    if strategy.num_workers > 1:
        replacements["predict"] = local_methods["predict"]
        replacements["test_on_batch"] = functools.partial(_test_on_batch, model, type(trainer))
        replacements["train_on_batch"] = functools.partial(_train_on_batch, model, type(trainer))
        replacements["get_metrics_result"] = functools.partial(keras_metrics.noted_results, model)
    _set_methods(model, replacements)
    if strategy.num_replicas > 1 and strategy.engine.runs_own_steps:
        _set_own_step_methods(model, type(trainer), local_methods if strategy.num_workers > 1 else {})


def _set_own_step_methods(
    model: keras.Model, make_trainer: Callable[..., Any], local_methods: Mapping[str, Callable[..., Any]]
) -> None:
    """Set the methods whose steps the class overrides, which a trainer runs with the results of one device.

    Args:
        model: A model.
        make_trainer: The class of trainers.
        local_methods: Methods that each worker calls by itself, in place of a trainer's.
    """
    methods = _trainer_methods(model, make_trainer) | {
        "train_on_batch": functools.partial(_train_on_batch, model, make_trainer),
        "test_on_batch": functools.partial(_test_on_batch, model, make_trainer),
        "predict_on_batch": functools.partial(_predict_on_batch, model, make_trainer),
        **local_methods,
    }
    for name, method in methods.items():
        if not keras_model.overridden(model, name) and own_step.overrides(model, _kind(name)):
            setattr(model, name, method)


def _kind(name: str) -> str:
    """Return the kind of steps that a method runs."""
    return "predict" if "predict" in name else "train" if name in ("fit", "train_on_batch") else "evaluate"


def give_methods(model: keras.Model, make_trainer: Callable[..., Any]) -> None:
    """Give a new model in the scope of a tfpar strategy methods that create its trainer when they are called.

    Args:
        model: A model; methods that its class overrides stay.
        make_trainer: The class of trainers.
    """
    strategy: Strategy = model_scopes.noted_strategy(model)
    methods: dict[str, Callable[..., Any]] = {
        name: functools.partial(_with_new_trainer, model, name, make_trainer) for name in _METHODS
    }
    if strategy.num_workers > 1 and strategy.engine.home is not None:  # each worker predicts by itself
        methods |= _local_methods(model, strategy)
    methods |= {name: functools.partial(_with_memory, model, name) for name in _ASSIGNING}
    for name, method in methods.items():
        if not keras_model.overridden(model, name):
            setattr(model, name, method)


def _with_new_trainer(
    model: keras.Model, name: str, make_trainer: Callable[..., Any], *arguments: Any, **settings: Any
) -> Any:
    strategy: Strategy = model_scopes.noted_strategy(model)
    barriers.barrier(strategy.job, _ON_BATCH.get(name, name))
    get_or_make_trainer(model, make_trainer)
    return getattr(model, name)(*arguments, **settings)


def _with_memory(model: keras.Model, name: str, *arguments: Any, **settings: Any) -> None:
    """Call Keras' own method that assigns weights, on the host where the strategy has not placed them yet."""
    for variable in model.variables:
        if not keras_variables.is_allocated(variable):
            keras_weight_placement.place(variable, "CPU:0")
    getattr(type(model), name)(model, *arguments, **settings)


def _local_methods(model: keras.Model, strategy: Strategy) -> dict[str, Callable[..., Any]]:
    """Return Keras' own methods to predict, for the weights on this worker's first device."""
    functions = StepFunctions(model, strategy.engine)
    return {name: functools.partial(_call_locally, model, functions, name) for name in ("predict", "predict_on_batch")}


def _trainer_methods(model: keras.Model, make_trainer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {name: functools.partial(_through_trainer, model, name, make_trainer) for name in _TRAINER_METHODS}


def _set_methods(model: keras.Model, replacements: Mapping[str, Callable[..., Any]]) -> None:
    """Set the methods that the class of a model does not override."""
    in_tfpar_scope = model_scopes.noted_strategy(model) is not None  # where a trainer refuses an overridden step
    for name, replacement in replacements.items():
        if not (keras_model.overridden(model, name) if in_tfpar_scope else _is_overridden(model, name)):
            setattr(model, name, replacement)


def _is_overridden(model: keras.Model, name: str) -> bool:
    """Return whether the class of a model overrides a method or the step that it runs."""
    return keras_model.overridden(model, name) or keras_model.overridden(model, own_step.METHODS[_kind(name)])


def _inner_models(model: keras.Model) -> list[keras.Model]:
    """Return the models inside of a model, at any depth, that have no trainer of their own."""
    layers = [layer for layer in keras_model.all_layers(model) if layer is not model]
    return [layer for layer in layers if isinstance(layer, keras.Model) and get_trainer(layer) is None]


def _replace_inner(inner: keras.Model, make_trainer: Callable[..., Any], *, replaces: bool) -> None:
    for name in _METHODS:
        if getattr(vars(inner).get(name), "func", None) in (_through_trainer, _refuse_on_batch):
            del vars(inner)[name]  # of an earlier trainer
        if replaces and not _is_overridden(inner, name) and name != "predict_on_batch":
            through_trainer = functools.partial(_through_trainer, inner, name, make_trainer)
            refuse = functools.partial(_refuse_on_batch, inner, name)
            setattr(inner, name, refuse if name.endswith("_on_batch") else through_trainer)


def _through_trainer(
    model: keras.Model, name: str, make_trainer: Callable[..., Any], *arguments: Any, **settings: Any
) -> Any:
    return getattr(get_or_make_trainer(model, make_trainer), name)(*arguments, **settings)


def _refuse_on_batch(inner: keras.Model, name: str, *arguments: Any, **settings: Any) -> None:
    raise ValueError(
        f"{name} of {inner.name!r} is Keras' own, which does not run on the copies of weights that a trainer has on "
        f"several devices. Use {_ON_BATCH[name]}(x, y, batch_size=len(x)) of {inner.name!r}, or objectives of the "
        "whole model."
    )


@contextlib.contextmanager
def refused_in_model_function(strategy: Strategy) -> Iterator[None]:
    """Refuse Keras' own methods while a model function runs in the scope of a `tf.distribute` strategy.

    They do not run in a job of several workers. In one process they fail for odd batches, and train other weights, for
    example because each replica clips its own gradient.
    """

    def refuse(name: str, *arguments: Any, **settings: Any) -> None:
        if strategy.num_workers == 1:
            raise ValueError(
                f"A model function cannot call {name}: in the scope of replicas, Keras' own gives other results than "
                "on one device. Call tfpar.fit, tfpar.evaluate or tfpar.predict with that model there."
            )
        raise ValueError(
            f"A model function cannot call {name} in a job of several workers, where Keras' own does not run. Call "
            f"trainer.{name} with the model that it returns, or load weights that were trained before the job."
        )

    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    with contextlib.ExitStack() as stack:
        for name in names if strategy.num_replicas > 1 and strategy.engine.home is not None else ():
            stack.enter_context(mock.patch.object(keras.Model, name, functools.partial(refuse, name)))
        yield


def _save_atomically(model: keras.Model, name: str, filepath: str | Path, *arguments: Any, **settings: Any) -> None:
    """Save to a file that is renamed when it is complete: several workers of a machine may write the same file."""
    method, path = getattr(type(model), name), Path(filepath)
    is_one_file = path.suffix in (".keras", ".h5") and path.parent.is_dir() and not path.is_dir()
    if not is_one_file or arguments or settings not in ({}, {"overwrite": True}):  # such as max_shard_size
        method(model, filepath, *arguments, **settings)
        return
    with atomic_file.new_by_path(path) as unfinished:
        method(model, unfinished, *arguments, **settings)


def get_trainer(model: keras.Model) -> Any:
    """Return the newest trainer of a model; None if it has none, or not any more."""
    trainer = getattr(model, "_tfpar_trainer", None)
    return trainer() if isinstance(trainer, weakref.ref) else trainer


def get_or_make_trainer(model: keras.Model, make_trainer: Callable[..., Any]) -> Any:
    """Return the newest trainer of a model, or create one, under the model's strategy, that the model keeps alive.

    Args:
        model: A model.
        make_trainer: The class of trainers.
    """
    trainer = get_trainer(model)
    if trainer is None:
        trainer = make_trainer(model, strategy_of(model), seed=None)  # replaces the model's methods
        model._tfpar_trainer = trainer
    return trainer


def _call_locally(model: keras.Model, functions: StepFunctions, name: str, *arguments: Any, **settings: Any) -> Any:

    def call() -> Any:
        compiled = functions.once("Keras' own predict", lambda: keras_model.predict_function(model))
        with keras_model.out_of_scope(model, compiled):
            return getattr(type(model), name)(model, *arguments, **settings)

    if not tf.distribute.has_strategy():
        return call()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a thread in no scope
        return thread.submit(call).result()


def _test_on_batch(
    model: keras.Model,
    make_trainer: Callable[..., Any],
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    return _through_trainer(
        model, "evaluate", make_trainer, x, y, batch_size=_num_examples(x), verbose=0, sample_weight=sample_weight,
        return_dict=return_dict,
    )  # fmt: skip


def _train_on_batch(
    model: keras.Model,
    make_trainer: Callable[..., Any],
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Run one train step of the trainer; the metrics are those of this batch alone."""
    settings = {"sample_weight": sample_weight, "class_weight": class_weight, "batch_size": _num_examples(x)}
    history = _through_trainer(model, "fit", make_trainer, x, y, verbose=0, shuffle=False, **settings).history
    logs = {name: values[-1] for name, values in history.items()}
    return logs if return_dict else keras_metrics.metrics_in_order(model, logs)


def _predict_on_batch(model: keras.Model, make_trainer: Callable[..., Any], x: Any) -> Any:
    return _through_trainer(model, "predict", make_trainer, x, batch_size=_num_examples(x), verbose=0)


def _num_examples(x: Any) -> int:
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return int(first.shape[0]) if hasattr(first, "shape") else len(first)

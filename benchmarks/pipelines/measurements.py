"""What a turn of a pipeline experiment asks of tfpar and Keras, in a process that is set up for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import tfpar
from benchmarks.harness import Output
from benchmarks.pipelines.examples import arrays
from benchmarks.pipelines.memory import together_bytes
from benchmarks.pipelines.models import BUILD_MODEL
from benchmarks.pipelines.setting import Setting
from tfpar.cluster import process_memory


def _model_of(setting: Setting) -> Any:
    """Return what has `fit`: a trainer of tfpar, or the Keras model itself."""
    build_model = BUILD_MODEL[setting.workload]
    if setting.trainer == "keras":
        keras.utils.set_random_seed(0)
        return build_model()
    if setting.trainer == "one_device":
        return tfpar.Trainer(build_model, tfpar.SingleDevice(), seed=0)
    return tfpar.Trainer(build_model, _strategy_of(setting), seed=0)


def _strategy_of(setting: Setting) -> tfpar.Strategy:
    if setting.trainer == "multi_worker":
        return tfpar.MultiWorker()
    if setting.trainer in ("mirrored", "sharded_weights"):
        return tfpar.Mirrored(shard="weights" if setting.trainer == "sharded_weights" else None)
    across = setting.trainer == "pipeline" and setting.num_workers > 1
    pipeline = tfpar.Pipeline(
        num_stages=setting.num_stages,
        num_microbatches=setting.num_microbatches // (setting.num_workers if setting.trainer == "hybrid" else 1),
        schedule=setting.schedule,
        balance=setting.balance,
        devices=None if across else [f"CPU:{number}" for number in range(setting.num_devices)],
        recompute=setting.recompute,
        across_workers=across,
    )
    return tfpar.Hybrid(pipeline) if setting.trainer == "hybrid" else pipeline


def _prediction_of(trainer: Any, dataset: Any) -> Any:
    """Return what a pipeline says of its step before it trains.

    Args:
        trainer: A `tfpar.Trainer` of a pipeline.
        dataset: Batches of the size that the output is for.
    """
    return trainer.preview(dataset)


def _batches(setting: Setting, num_rows: int) -> Any:
    """Return a dataset of one batch that stays in memory, of any number of rows as far as its type says."""
    return tf.data.Dataset.from_tensor_slices(arrays(setting.workload, num_rows)).batch(num_rows).cache()


def _laps(setting: Setting) -> Output:
    return _train_laps(setting, _model_of(setting))


def _prediction(setting: Setting) -> Output:
    trainer = _model_of(setting)
    predicted = _prediction_of(trainer, _batches(setting, setting.batch_size)).planned
    return {**_train_laps(setting, trainer), "predicted_seconds": predicted.step_seconds}


def _train_laps(setting: Setting, trainer: Any) -> dict[str, float]:
    """Time the epochs of one `fit`; the first, which compiles, is left out."""
    begins: list[Times] = []
    ends: list[Times] = []
    laps = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(_now()), on_epoch_end=lambda epoch, logs: ends.append(_now())
    )
    trainer.fit(
        _batches(setting, setting.batch_size).repeat(),
        epochs=1 + setting.num_laps,
        steps_per_epoch=setting.steps_per_lap,
        callbacks=[laps],
        verbose=0,
    )
    pairs = list(zip(begins, ends, strict=True))[1:]
    return {
        "step_seconds": statistics.median(end.clock - begin.clock for begin, end in pairs) / setting.steps_per_lap,
        "processor_seconds": statistics.median(end.processor - begin.processor for begin, end in pairs)
        / setting.steps_per_lap,
        "num_parameters": trainer.model.count_params(),
    }


class Times(NamedTuple):
    """Seconds by the clock, and of all threads of this process."""

    clock: float
    processor: float


def _now() -> Times:
    return Times(time.perf_counter(), time.process_time())


def _first_step(setting: Setting) -> Output:
    """Time from before the model is made to the end of the first step, and the second step for comparison."""
    data = _batches(setting, setting.batch_size).repeat(2)
    ends: list[Times] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: ends.append(_now()))
    began = _now()
    model = _model_of(setting)
    built = _now()
    model.fit(data, callbacks=[note], verbose=0)
    first, second = ends
    return {
        "first_step_seconds": first.clock - began.clock,
        "processor_seconds": first.processor - began.processor,
        "model_seconds": built.clock - began.clock,
        "second_step_seconds": second.clock - first.clock,
    }


def _memory(setting: Setting) -> Output:
    """Measure the most memory of a step above that before it.

    A first step of one row a micro-batch traces the same function and creates whatever stays; it is too small to
    leave TensorFlow's allocator, which returns nothing to the system, much to reuse. By its end the batch of the
    second step, the measured one, is there already.
    """
    full = _batches(setting, setting.batch_size)
    peaks: list[int] = []
    before: list[int] = []

    def note(step: int, logs: Any = None) -> None:
        peaks.append(process_memory.peak_bytes())
        process_memory.reset_peak()
        before.append(process_memory.resident_bytes())

    _model_of(setting).fit(
        _batches(setting, setting.num_microbatches).concatenate(full),
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)],
        verbose=0,
    )
    output = {"peak_bytes": float(peaks[1] - before[0])}
    if setting.trainer == "pipeline":
        trainer = _model_of(setting)  # a new one, because the first one was prepared with a small batch
        trainer.fit(full, verbose=0)
        output["predicted_bytes"] = together_bytes(_prediction_of(trainer, full))
    return output


def _parts(setting: Setting) -> Output:
    """Measure the actions and the update of a stage, all stages on one device; the median of the equal stages."""
    build_model = BUILD_MODEL[setting.workload]
    layers = [layer for layer in build_model().layers if not isinstance(layer, keras.layers.InputLayer)]
    per_stage, rest = divmod(len(layers), setting.num_stages)
    assert not rest, "each stage has the layers of one block"
    pipeline = tfpar.Pipeline(
        setting.num_stages,
        setting.num_microbatches,
        setting.schedule,
        balance=[per_stage] * setting.num_stages,
        devices=["CPU:0"],
    )
    trainer = tfpar.Trainer(build_model, pipeline, seed=0)
    found = _prediction_of(trainer, _batches(setting, setting.batch_size))
    durations, inner = found.durations, found.rows[0]
    return {
        "forward_seconds": statistics.median(durations.forward_seconds),
        "backward_seconds": statistics.median(durations.backward_seconds),
        "update_seconds": statistics.median(durations.update_seconds),
        "cut_bytes": inner.cut_bytes,
        "gradient_bytes": inner.num_parameters * tf.float32.size,
    }


MEASUREMENTS: dict[str, Callable[[Setting], Output]] = {
    "laps": _laps,
    "prediction": _prediction,
    "memory": _memory,
    "first_step": _first_step,
    "parts": _parts,
}

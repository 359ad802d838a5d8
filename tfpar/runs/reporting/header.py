"""The header that the train command prints before the first step: devices, model, data, batch."""

from __future__ import annotations

import itertools

import keras
import tensorflow as tf

import tfpar
from tfpar import config, data, strategies
from tfpar.cluster import cores
from tfpar.config import settings_read, toml
from tfpar.messages.number_format import counted, line
from tfpar.runs import built_objects, run_data
from tfpar.runs.directory import RunDirectory
from tfpar.runs.run_trainer import RunTrainer, class_names, sharding
from tfpar.runs.user_trainer import trainer_options, trainer_reads

MAX_SHOWN = 10  # class names


def print_header(run: config.Run, directory: RunDirectory, trainer: RunTrainer, note: str = "") -> None:
    """Print the header.

    Args:
        run: The run.
        directory: The run directory.
        trainer: The trainer of the run.
        note: What to append to the line of the strategy.
    """
    for name, text in lines(run, directory, trainer).items():
        if text:
            print(line(name, text + note * (name == "strategy")))
    print(flush=True)


def lines(run: config.Run, directory: RunDirectory, trainer: RunTrainer) -> dict[str, str]:
    """Return the lines of the header, by label; some may be empty."""
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    local = [spec for spec in specs if spec.task in (None, trainer.strategy.rank)]
    devices = ", ".join(f"{spec.device_type}:{spec.device_index}" for spec in local)
    read = settings_read.read_keys(trainer_reads(run))
    known = run_data.num_steps(run, trainer.train_data)
    steps = "a number not yet known of" if known is None else f"{known:,}"
    return {
        "run": f"{directory.path} (tfpar {tfpar.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__})",
        "devices": f"{devices} ({counted(cores.num_allowed_cores(), 'core')})",
        "note": "" if any(spec.device_type == "GPU" for spec in local) else _note(trainer.strategy),
        "strategy": trainer.strategy.describe(),
        "model": ", ".join(
            [trainer.model.name, _num_parameters(trainer.model), built_objects.describe_precision(trainer.model)]
        ),
        "optimizer": built_objects.describe_optimizer(trainer.model),
        "kernels": _kernels_line(trainer),
        "options": _options_line(run),
        "data": _data_line(run, trainer, "data.source" in read),
        "sharding": sharding(trainer) if trainer.strategy.num_workers > 1 else "",
        "batch": _batch_line(run, trainer),
        "epochs": f"{run.training.epochs}, of {steps} steps each",
    }


def _note(strategy: strategies.Strategy) -> str:
    if len(strategy.device_names) < 2:
        return ""
    return (
        "logical CPUs share the cores that one device uses alone: they show that results agree, not how fast several "
        "devices are"
    )


def _kernels_line(trainer: RunTrainer) -> str:
    is_fused = getattr(trainer, "fused", False) and not trainer.model.jit_compile
    return "fused, with Keras' results up to the last digits" if is_fused else ""


def _batch_line(run: config.Run, trainer: RunTrainer) -> str:
    number, part = trainer.strategy.engine.batch_parts
    parts = f"{number} {part}{'' if number == 1 else 'es' if part.endswith('h') else 's'}"
    is_read = settings_read.BATCH in settings_read.read_keys(trainer_reads(run))
    if not is_read and data.is_dataset(trainer.train_data):
        return f"as {run.trainer} makes it, over {parts}"
    batch = run.training.global_batch_size
    rows = itertools.pairwise(data.first_rows(batch, trainer.strategy.engine.shares))
    sizes = sorted({end - start for start, end in rows})
    return f"{batch} examples = {parts} x {' to '.join(map(str, [*sizes[:1], *sizes[1:][-1:]]))}"


def _options_line(run: config.Run) -> str:
    options = trainer_options(run)
    return ", ".join(f"{key} = {toml.show(value)}" for key, value in options.items())


def _data_line(run: config.Run, trainer: RunTrainer, is_read: bool) -> str:
    origin = data.describe(run.data) if is_read else f"of {run.trainer}"
    examples = f"{trainer.num_train_examples:,} examples" if trainer.num_train_examples else "examples not counted"
    names = class_names(trainer)
    shown = f", {len(names)} classes: {', '.join(names[:MAX_SHOWN])}" if names else ""
    more = ", ..." if len(names) > MAX_SHOWN else ""
    return f"{origin}, {examples} to train" + ("" if trainer.validation_data is None else ", validated") + shown + more


def _num_parameters(model: keras.Model) -> str:
    return f"{model.count_params():,} parameters" if model.built else "parameters counted at the first batch"

"""What the train command prints before the first step: devices, model, data and the arithmetic of the batch."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf

import tfpar
from tfpar import config
from tfpar.run_directory import RunDirectory

BY_BATCH = "by batch: every worker takes its share of each global batch"


def print_header(run: config.Run, directory: RunDirectory, trainer: Any) -> None:
    """Print what will be trained, where and how large each step is.

    Args:
        run: The resolved run.
        directory: Its folder.
        trainer: The trainer of the run.
    """
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    here = [spec for spec in specs if spec.task in (None, trainer.strategy.rank)]
    devices = ", ".join(f"{spec.device_type}:{spec.device_index}" for spec in here)
    batch, replicas = run.training.global_batch_size, trainer.strategy.num_replicas
    steps = int(trainer.train_data.cardinality())
    share = f"{batch // replicas}" if batch % replicas == 0 else f"{batch // replicas} to {-(-batch // replicas)}"
    lines = {
        "run": f"{directory.path} (tfpar {tfpar.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__})",
        "devices": f"{devices} ({os.cpu_count()} cores)",
        "strategy": trainer.strategy.describe(),
        "model": f"{trainer.model.name}, {_num_parameters(trainer.model)}, {run.training.precision}",
        "data": _data_line(run.data, trainer),
        "division": getattr(trainer, "division", BY_BATCH),
        "batch": f"{batch} examples = {replicas} replica{'s' * (replicas > 1)} x {share}",
        "epochs": f"{run.training.epochs}, of {f'{steps:,}' if steps >= 0 else 'a number not yet known of'} steps each",
    }
    for name, text in lines.items():
        print(f"{name:10}{text}")
    print(flush=True)


def _data_line(settings: config.Data, trainer: Any) -> str:
    origin = {
        "tfds": settings.name,
        "tfrecord": f"TFRecord files in {settings.directory}",
        "generated": "generated",
        "python_source": f"Python source files in {settings.directory or 'the standard library'}",
    }
    examples = f"{trainer.num_train_examples:,} examples" if trainer.num_train_examples else "examples not counted"
    return f"{origin[settings.source]}, {examples} to train" + (
        "" if trainer.validation_data is None else ", validated"
    )


def _num_parameters(model: keras.Model) -> str:
    return f"{model.count_params():,} parameters" if model.built else "parameters counted at the first batch"

"""Errors about the memory of a device: one sentence with the device, the tensor and the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.support import made_up_gpus, parity_cases, stand_ins
from tfpar.loops.memory_errors import explain

pytestmark = pytest.mark.usefixtures("logical_cpus")

PLACE = "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc"


def error(message: str) -> tf.errors.ResourceExhaustedError:
    return tf.errors.ResourceExhaustedError(None, None, message)


def test_the_memory_that_other_processes_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_gpus.install(monkeypatch, [1, 1])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", stand_ins.nvidia_smi(tmp_path, stand_ins.table(2, used_mib=80_000)))
    assert explain(error(f"OOM when allocating tensor with shape[8,4] and type float on {PLACE} [[{{node x}}]]")) == (
        "GPU:1 must have memory for the step, and a tensor of shape [8,4] and type float could not be allocated. "
        "nvidia-smi reports 80,000 of 81,559 MiB in use, by all processes. Use a smaller batch with "
        "gradient_accumulation_steps, or a pipeline, in which each device holds one stage, or end other processes on "
        "the GPU."
    )


@pytest.mark.parametrize("message", ["Out of memory while trying to allocate 99 bytes.", "failed to allocate memory"])
def test_messages_without_a_tensor_are_known_too(message: str) -> None:
    sentence = explain(error(message))
    assert sentence is not None
    assert sentence.startswith("A device must have memory for the step, and an operation could not allocate it. Use a")


def test_other_errors_are_not() -> None:
    assert explain(error("run/events.v2; No space left on device")) is None
    assert explain(ValueError("OOM when allocating")) is None


@pytest.mark.extended
def test_a_trainer_raises_the_sentence_as_the_error_of_tensorflow() -> None:
    """TensorFlow waits ten seconds for the memory."""

    def hugely(x: Any) -> Any:
        return x + tf.reduce_sum(tf.fill([1 << 21, tf.shape(x)[0] * (1 << 24)], x[0, 0]))

    def too_large() -> keras.Model:
        return parity_cases.classifier(layers=lambda: [keras.layers.Lambda(hugely)])()

    message = "must have memory for the step, and a tensor of shape [2097152,"
    with pytest.raises(tf.errors.ResourceExhaustedError, match=re.escape(message)) as raised:
        tfpar.Trainer(too_large, seed=0).fit(parity_cases.batches(8, 8), verbose=0)
    assert "\n" not in raised.value.message

"""The bytes of small models, compared with those counted by hand."""

from __future__ import annotations

from unittest import mock

import keras
import pytest
import tensorflow as tf

from tfpar.pipeline.graph import tracing
from tfpar.planning import memory_measurement
from tfpar.planning.memory_measurement import block_bytes, model_bytes, runtime_bytes


def chain(activation: str | None, number: int = 3, width: int = 32) -> keras.Model:
    hidden = [keras.layers.Dense(width, activation=activation) for _ in range(number)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_dense_layers_save_their_inputs_and_the_outputs_of_relu_each_once() -> None:
    found = block_bytes(tracing.trace(chain("relu")), [tf.zeros([64, 32])], 64)
    one = 64 * 32 * 4
    assert [block.saved.of(64) for block in found] == [2 * one, one, one]
    assert [block.shared.of(64) for block in found] == [0, one, one]
    assert all(block.temporary.of(64) >= one for block in found)


def test_linear_layers_save_their_inputs_alone() -> None:
    found = block_bytes(tracing.trace(chain(None)), [tf.zeros([64, 32])], 64)
    assert [block.saved.of(64) for block in found] == [64 * 32 * 4] * 3
    assert [block.shared.of(64) for block in found] == [0, 0, 0]


def test_layers_before_all_trained_weights_save_nothing() -> None:
    model = chain("relu", number=4)
    model.layers[0].trainable = model.layers[1].trainable = model.layers[3].trainable = False
    found = block_bytes(tracing.trace(model), [tf.zeros([64, 32])], 64)
    one = 64 * 32 * 4
    # The third saves its input and its output; the gradient of the last passes through its relu, and needs no input.
    assert [block.saved.of(64) for block in found] == [0, 0, 2 * one, one]
    assert [block.shared.of(64) for block in found] == [0, 0, 0, 0]
    assert [block.temporary.of(64) >= 2 * one for block in found[:2]] == [True, True]  # an input and an output


def test_recurrent_layers_save_their_gates_and_states_of_all_steps() -> None:
    model = keras.Sequential([keras.Input((20, 8)), keras.layers.LSTM(32, return_sequences=True)])
    (block,) = block_bytes(tracing.trace(model), [tf.zeros([16, 20, 8])], 16)
    state_bytes = 16 * 20 * 32 * 4
    # Three gates, the candidate, the cell state and its tanh, the state, and the inputs of a quarter of a state.
    assert 7 * state_bytes <= block.saved.of(16) <= 8.5 * state_bytes


def test_the_bytes_of_a_model_are_those_of_its_variables_and_of_the_saved_tensors() -> None:
    model, width = chain("relu", number=6, width=128), 128
    examples = tf.zeros([4096, width]), tf.zeros([4096, width])
    found = model_bytes(model, examples)
    number = 6 * (width * width + width)
    assert (found.weight_bytes, found.trainable_bytes) == (4 * number, 4 * number)
    assert 8 * number <= found.slot_bytes < 8 * number + 64
    saved = 6 * width * 4  # the outputs of all layers; the inputs belong to the batch
    # Threads choose the order: where those of the weights' gradients come last, each layer's gradient waits for them.
    assert saved <= found.working.bytes_per_example <= saved + (6 + 4) * width * 4
    with mock.patch.object(memory_measurement, "counts_bytes", return_value=False):
        read = model_bytes(model, examples)
    assert saved <= read.working.bytes_per_example <= saved + 4 * width * 4
    assert read.scratch.bytes_per_example == 0
    counted = [10**9, 10**9 + 2048 * (saved + 5 * width * 4)]
    with mock.patch.object(memory_measurement, "_most_counted_bytes", side_effect=counted):
        scratch = model_bytes(model, examples).scratch
    beyond = saved + 5 * width * 4 - read.working.bytes_per_example
    assert scratch == (0, pytest.approx(beyond)), "what the batch adds beyond the tensors of its operations"


def test_the_runtime_of_a_gpu_is_what_tensorflow_has_allocated_there() -> None:
    runtime_bytes.cache_clear()
    info = {"current": 512, "peak": 1024}
    with (
        mock.patch.object(tf.config.experimental, "get_memory_info", return_value=info),
        mock.patch.object(memory_measurement.tf, "device", return_value=tf.device("CPU:0")),
    ):
        assert runtime_bytes("GPU:0") == 512
    runtime_bytes.cache_clear()

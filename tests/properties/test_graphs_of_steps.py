"""What users feel of the graph of a step: its size, traces, compilations and memory, and when gradients are sent."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpar
from tests import ROOT
from tests.support.extent import sampled
from tfpar.engines.workers import collectives
from tfpar.placement.owners import num_bytes

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]

# Size


def model_with_states() -> keras.Model:
    """A model with Dropout, an embedding and an added loss, whose states, rows and sums a loop must carry."""
    tokens = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(7, 4)(tokens))
    hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(8, "tanh")(hidden))
    hidden = keras.layers.ActivityRegularization(l2=0.01)(keras.layers.Dense(8)(hidden))
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def num_operations(schedule: str, num_microbatches: int) -> int:
    """Return the number of operations in the graph of a train step, those of all functions included."""
    num_stages, devices = (4, TWO) if schedule == "interleaved" else (2, None)
    strategy = tfpar.Pipeline(num_stages, num_microbatches, schedule, balance="parameters", devices=devices)
    trainer = tfpar.Trainer(model_with_states, strategy, seed=0)
    features = np.arange(192, dtype="int32").reshape(64, 3) % 7
    batch = trainer.build(tf.data.Dataset.from_tensor_slices((features, features[:, 0] % 2)).batch(64))
    trainer.fit(features, features[:, 0] % 2, batch_size=64, verbose=0)
    step = tf.function(lambda: strategy.engine.train_step(trainer.model, batch), autograph=False)
    graph = step.get_concrete_function().graph.as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


@pytest.mark.parametrize("schedule", sampled(["1f1b", "gpipe", "zero_bubble", "interleaved"], of_ci=["1f1b"]))
def test_a_micro_batch_adds_to_the_graph_only_its_rows_of_the_embedding(schedule: str) -> None:
    few, many = (num_operations(schedule, count) for count in (8, 32))
    assert many - few <= 3 * (32 - 8)


# Traces


class CountingSGD(keras.optimizers.SGD):
    """Counts how often Python calls it: once for each trace of a step."""

    num_traces = 0

    def apply(self, *args: Any, **kwargs: Any) -> None:
        self.num_traces += 1
        super().apply(*args, **kwargs)


def means_of_sequences() -> keras.Model:
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((None, 3)), *layers])
    model.compile(CountingSGD(0.1), "mse")
    return model


def sequences(length: int) -> tf.data.Dataset:
    generator = np.random.default_rng(length)
    pairs = generator.normal(size=(8, length, 3)).astype("float32"), generator.normal(size=(8, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(pairs).batch(4, drop_remainder=True)


def test_a_step_is_traced_once_for_each_length_of_sequences() -> None:
    """No variable may be created in the first trace of a step, or TensorFlow traces again."""
    keras.utils.clear_session()  # other tests may have drawn from Keras' global generator, which then exists
    histories = []
    for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(2, 2)):
        trainer = tfpar.Trainer(means_of_sequences, strategy, seed=0)
        losses = []
        for num_traces, length in enumerate((5, 7), 1):
            losses += trainer.fit(sequences(length), epochs=2, verbose=0).history["loss"]
            assert trainer.model.optimizer.num_traces == num_traces
        histories.append(losses)
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)


# Compilations by XLA, which writes a file for each, in a process of their own

# Global batches of 10, 10 and 5 examples: four micro-batches have 3, 3, 2 and 2, and 2, 1, 1 and 1.
NUM_EXAMPLES, BATCH_SIZE = 25, 10
COMPILED: dict[str, tuple[Callable[[], tfpar.Strategy], int, int]] = {
    "one device": (lambda: tfpar.SingleDevice(), 2, 4),  # sizes; evaluation and prediction
    # Passes and stages, of one size; evaluation and prediction have the same.
    "stages": (lambda: tfpar.Pipeline(2, 4, balance="parameters"), 4, 2),
}
PROGRAM = """
import sys
from pathlib import Path

import tfpar

tfpar.use_logical_cpus(2)

import keras
from tests.properties import test_graphs_of_steps as this
from tests.support import parity_cases

counts, dumped = [], Path(sys.argv[1])


def count():
    counts.append(len(list(dumped.glob("*before_optimizations.txt"))) - sum(counts))


dataset = parity_cases.batches(this.NUM_EXAMPLES, this.BATCH_SIZE)
for strategy, *_ in this.COMPILED.values():
    build = parity_cases.classifier(
        layers=lambda: [keras.layers.LayerNormalization(), keras.layers.Dropout(0.5)], jit_compile=True
    )
    trainer = tfpar.Trainer(build, strategy(), seed=0)
    trainer.fit(dataset, epochs=3, verbose=0)
    count()
    trainer.evaluate(dataset, verbose=0)
    trainer.predict(parity_cases.inputs(this.NUM_EXAMPLES), batch_size=this.BATCH_SIZE, verbose=0)
    count()
print(this.json.dumps(counts))
"""


@pytest.mark.extended
@pytest.mark.slow_start
def test_xla_compiles_once_for_each_size_of_a_batch_or_once_for_all_micro_batches(tmp_path: Any) -> None:
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [count for _, *counts in COMPILED.values() for count in counts]


# Memory


WIDTH = 1024


def wide() -> keras.Model:
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, use_bias=False) for _ in range(2))])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def held_bytes(device: str) -> int:
    gc.collect()
    try:
        return int(tf.config.experimental.get_memory_info(device)["current"])
    except ValueError:  # an allocator that counts nothing
        pytest.skip("TensorFlow does not count the memory of CPUs here")


def test_no_gradients_are_held_between_steps_of_a_pipeline() -> None:
    trainer = tfpar.Trainer(wide, tfpar.Pipeline(2, 4, "zero_bubble", devices=TWO, balance=[1, 1]))
    dataset = tf.data.Dataset.from_tensors((tf.zeros([8, WIDTH]), tf.zeros([8, WIDTH]))).repeat()
    trainer.build(dataset)
    before_bytes = held_bytes("CPU:0")
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    gradient_bytes = sum(map(num_bytes, trainer.model.trainable_variables))
    assert held_bytes("CPU:0") - before_bytes < gradient_bytes / 4


# Gradients

PACK_BYTES = 64 << 10


def build_cnn() -> keras.Model:
    """The kernel of the first Dense layer, 288 x 64, is larger than `PACK_BYTES`; all other weights are smaller."""
    layers = [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(64, "relu")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def operations_of_step(strategy: tfpar.Strategy) -> list[tf.Operation]:
    """Return the operations of a train step of the CNN."""
    rng = np.random.default_rng(0)
    pairs = rng.random((16, 8, 8, 1), "float32"), rng.integers(0, 3, 16)
    images = tf.data.Dataset.from_tensor_slices(pairs).batch(8)
    trainer = tfpar.Trainer(build_cnn, strategy, seed=0)
    trainer.fit(images, verbose=0)
    step = tf.function(lambda *batch: strategy.engine.train_step(trainer.model, batch), autograph=False)
    without_digest = strategy.engine.distribute(images).dataset.element_spec[:-1]
    return step.get_concrete_function(*without_digest).graph.get_operations()  # type: ignore[no-any-return]


def needs(op: tf.Operation) -> set[tf.Operation]:
    """Return all operations that must run before another."""
    before: set[tf.Operation] = set()
    waiting = [op]
    while waiting:
        here = waiting.pop()
        new = {*(tensor.op for tensor in here.inputs), *here.control_inputs} - before
        before |= new
        waiting += new
    return before


@pytest.mark.parametrize("num_streams", [1, 4], ids=["as with NCCL", "as with a ring"])
def test_the_gradients_of_the_last_layers_are_sent_during_the_backward_pass_of_the_first(
    num_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "NUM_STREAMS", num_streams)
    operations = operations_of_step(tfpar.MultiWorker(TWO, pack_bytes=PACK_BYTES))
    sizes = {op: op.inputs[0].shape.num_elements() for op in operations if op.type.startswith("Collective")}
    # The shape of factors is unknown.
    message = next(op for op, size in sizes.items() if size is None or size >= PACK_BYTES // 4)
    assert [op.type for op in needs(message) if "gradient_tape" in op.name and "conv2d" in op.name] == []
    # TensorFlow's executor would otherwise compute the gradient of the large kernel last.
    for gradient in (op for op in operations if op.type == "Conv2DBackpropFilter"):
        kernels = {op.type for op in needs(gradient) if op.type in ("Pad", "PadV2") or _is_kernel(op)}
        assert len(kernels) == 1


def _is_kernel(op: tf.Operation) -> bool:
    return op.type == "MatMul" and op.outputs[0].shape == (288, 64)


# Steps of pipelines leave out most passes of TensorFlow's graph optimizer, and change no options of the user


@pytest.fixture
def graph_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What TensorFlow shall do to graphs: set what a user would, and read what a function called now would get."""
    here = context.context()

    def read(**chosen: bool) -> Any:
        monkeypatch.setattr(here, "_optimizer_experimental_options", chosen)
        here.function_call_options = None  # read again, as after tf.config.optimizer.set_experimental_options
        with tfpar.Pipeline(1, 1).engine.step_context():
            serialized = here.function_call_options.config_proto_serialized
        return tf.compat.v1.ConfigProto.FromString(serialized).graph_options.rewrite_options

    yield read
    monkeypatch.undo()
    here.function_call_options = None


def test_a_users_options_of_the_graph_optimizer_stay(graph_options: Callable[..., Any]) -> None:
    chosen = graph_options(constant_folding=False)
    assert chosen.constant_folding == chosen.OFF
    assert not chosen.optimizers

"""What a train step costs the host of a GPU: operations to launch, waits and copies, after the graph optimizer .

    python -m tests.support.step_counts

prints a line for each model with fused kernels and without, the most frequent operations, and which layers they are of.
No GPU is needed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.grappler import tf_optimizer

import tfpar
from tests.support import placement_cases
from tests.support.device_placement import HOST, Placed, Reading, Transfer, read_placement

NUM_BLOCKS, WIDTH, CONTEXT = 12, 16, 8


class Counts(NamedTuple):
    """The counts of a step.

    Attributes:
        kernels: The operations that a GPU computes.
        waits: What the host waits for.
        copies: The tensors that are copied between the memories of host and GPU.
        parameters: The number of weights.
    """

    kernels: list[Placed]
    waits: list[Transfer]
    copies: list[tuple[str, str]]
    parameters: int


def transformer() -> keras.Model:
    """12 blocks with attention to earlier tokens, of a small width, on which no count depends."""
    tokens = keras.Input((CONTEXT,), dtype="int32")
    hidden = layers.Embedding(32, WIDTH)(tokens)
    for _ in range(NUM_BLOCKS):
        normed = layers.LayerNormalization(epsilon=1e-5)(hidden)
        hidden = hidden + layers.MultiHeadAttention(2, WIDTH // 2)(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization(epsilon=1e-5)(hidden)
        hidden = hidden + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normed))
    return _compiled(keras.Model(tokens, layers.Dense(32)(layers.LayerNormalization()(hidden))), "adam")


def resnet20() -> keras.Model:
    """Three groups of three blocks of two convolutions."""

    def convolution(features: Any, filters: int, stride: int = 1) -> Any:
        return layers.BatchNormalization()(layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(features))

    images = keras.Input((16, 16, 3))
    hidden = layers.ReLU()(convolution(images, 4))
    for filters, stride in ((4, 1), (4, 1), (4, 1), (8, 2), (8, 1), (8, 1), (16, 2), (16, 1), (16, 1)):
        residual = convolution(layers.ReLU()(convolution(hidden, filters, stride)), filters)
        shortcut = hidden if stride == 1 else layers.Conv2D(filters, 1, stride)(hidden)
        hidden = layers.ReLU()(residual + shortcut)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden))
    return _compiled(keras.Model(images, outputs), keras.optimizers.SGD(0.1, momentum=0.9))


def _compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _tokens() -> tf.data.Dataset:
    arrays = np.zeros((8, CONTEXT), "int32"), np.zeros((8, CONTEXT), "int64")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def _images() -> tf.data.Dataset:
    arrays = np.zeros((8, 16, 16, 3), "float32"), np.zeros(8, "int64")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[], tf.data.Dataset]]] = {
    "transformer": (transformer, _tokens),
    "resnet20": (resnet20, _images),
}


def counts(model: str, fused: bool = True) -> Counts:
    """Trace a train step of a model on one GPU, optimize its graph, and count."""
    build, data = MODELS[model]
    built, function = placement_cases.launch(tfpar.SingleDevice("CPU:1"), build, data(), fused)
    gpus = {**placement_cases.GPUS, "GPU:0": "GPU:0"}
    reading: Reading = read_placement(function, gpus, HOST, _optimized(function))
    copies = {(one.source, one.target): (one.origin, one.target) for one in reading.copies}
    return Counts(reading.kernels, reading.host_waits, list(copies.values()), len(built.trainable_variables))


def _optimized(function: Any) -> Any:
    """Return the graph of a function as TensorFlow would run it on a GPU, but for fusions of its kernels."""
    graph_def = function.graph.as_graph_def()
    for nodes in (graph_def.node, *(one.node_def for one in graph_def.library.function)):
        for node in nodes:
            node.device = node.device.replace("CPU:1", "GPU:0")
    meta_graph = tf.compat.v1.train.export_meta_graph(graph_def=graph_def, graph=function.graph)
    ends = [one.name for one in function.graph.control_outputs]
    meta_graph.collection_def["train_op"].node_list.value.extend(ends)  # what the optimizer must not remove
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes, options.remapping, options.layout_optimizer = -1, options.OFF, options.OFF
    return tf_optimizer.OptimizeGraph(config, meta_graph)


def _print() -> None:
    tfpar.use_logical_cpus(3)
    for model in MODELS:
        for fused in (True, False):
            found = counts(model, fused)
            kinds = collections.Counter(one.kind for one in found.kernels)
            print(
                f"{model}, {'fused' if fused else 'not fused'}: {len(found.kernels)} operations of the GPU for "
                f"{found.parameters} weights, {len(found.waits)} waits, {len(found.copies)} copies"
            )
            print("   ", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(12)))


if __name__ == "__main__":
    _print()

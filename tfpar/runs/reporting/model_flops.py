"""The FLOPs of a training step, and the model FLOPs utilization (MFU) of the GPUs."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfpar.callbacks import Throughput
from tfpar.runs import built_objects
from tfpar.strategies import Strategy

# The backward pass computes two products for each product of the forward pass.
PASSES = 3
# Dense peaks in FLOP/s by prefix of the device name: float32 without and with TensorFloat-32, and 16 bits. From
# NVIDIA's data sheets, https://www.nvidia.com/en-us/data-center/, without sparsity.
PEAKS = {
    "Tesla V100-SXM2": (15.7e12, 15.7e12, 125e12),
    "Tesla T4": (8.1e12, 8.1e12, 65e12),
    "NVIDIA A100": (19.5e12, 156e12, 312e12),
    "NVIDIA L40S": (91.6e12, 183e12, 362e12),
    "NVIDIA H100 PCIe": (51.2e12, 378e12, 756e12),
    "NVIDIA H100 80GB HBM3": (66.9e12, 494.7e12, 989.4e12),
    "NVIDIA H200": (66.9e12, 494.7e12, 989.4e12),
}
# Operations that compute products, some of which TensorFlow's counter does not know.
_PRODUCTS = ("MatMul", "Conv", "Einsum", "RNN", "LSTM", "GRU", "FFT")
# Operations whose bodies are not counted.
_OPAQUE = ("While", "If", "Case", "PartitionedCall", "PyFunc", "XlaCallModule", "XlaLaunch")


class ModelFlops(keras.callbacks.Callback):
    """Count the FLOPs of a step, and write FLOPs and MFU to TensorBoard after each epoch.

    Args:
        strategy: The strategy of the training.
        throughput: The speed measurement, which must precede this callback.
        batch_size: Number of examples to count with.
        folder: A separate folder for TensorBoard; None to write nothing.

    Example:
        >>> throughput = tfpar.Throughput()
        >>> flops = ModelFlops(tfpar.SingleDevice("CPU:0"), throughput, batch_size=8)
        >>> history = trainer.fit(dataset, epochs=2, verbose=0, callbacks=[throughput, flops])
        >>> flops.figures({"examples_per_second": 1000.0, "step_milliseconds": 8.0})["flops_per_step"] > 0
        True
    """

    chief_only = True
    single_batches = False
    forgets = True

    def __init__(
        self, strategy: Strategy, throughput: Throughput, batch_size: int, folder: str | Path | None = None
    ) -> None:
        super().__init__()
        self._strategy, self._throughput, self._batch_size = strategy, throughput, batch_size
        self._folder = folder
        self._per_example: float | None = None
        self._peak: float | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count the FLOPs per example. Skipped in jobs: tracing on the chief alone may add collectives."""
        if self._strategy.num_workers > 1:
            return
        flops = forward_flops(self.model, self._batch_size)
        self._per_example = None if flops is None else PASSES * flops / self._batch_size
        self._peak = peak_flops_per_second(self._strategy, self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the figures of the epoch."""
        figures = self.figures(logs or {})
        if self._folder is None or not figures:
            return
        writer = tf.summary.create_file_writer(str(self._folder))
        with writer.as_default(step=epoch):
            for name, value in figures.items():
                tf.summary.scalar(f"epoch_{name}", value)
        writer.close()

    def figures(self, speed: Mapping[str, Any]) -> dict[str, float]:
        """Return the FLOPs of a step and the MFU, where known.

        Args:
            speed: The logs `examples_per_second` and `step_milliseconds`.
        """
        examples, milliseconds = (speed.get(name) for name in ("examples_per_second", "step_milliseconds"))
        if self._per_example is None or not examples or not milliseconds:
            return {}
        figures = {"flops_per_step": self._per_example * examples * milliseconds / 1e3}
        return figures | ({} if self._peak is None else {"mfu": self._per_example * examples / self._peak})


def forward_flops(model: keras.Model, batch_size: int) -> int | None:
    """Count the floating-point operations of a forward pass with TensorFlow's counter.

    Args:
        model: A built Functional or Sequential model.
        batch_size: Number of examples.

    Returns:
        The count; None if the graph has operations that cannot be counted, such as loops, or the shapes of the inputs
        are unknown.

    Example:
        >>> forward_flops(keras.Sequential([keras.Input([5]), keras.layers.Dense(8)]), 4)
        352
    """
    try:
        tensors = getattr(model, "input", model.inputs[0])  # a Sequential model has no `input` before its first call
        structure = keras.tree.map_structure(
            lambda tensor: tf.TensorSpec([batch_size, *tensor.shape[1:]], tensor.dtype), tensors
        )
        with _quiet():
            forward = tf.function(lambda batch: model(batch, training=False), autograph=False)
            return _counted(forward.get_concrete_function(structure).graph)
    except Exception:  # calling a user's model once more may raise anything
        return None


def _counted(graph: tf.Graph) -> int | None:
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    root = tf.compat.v1.profiler.profile(graph=graph, cmd="scope", options=options)
    flops = {node.name: node.float_ops for node in _nodes(root)}
    total = root.total_float_ops
    for operation in graph.get_operations():
        if operation.type.removeprefix("Stateless").removeprefix("Stateful").startswith(_OPAQUE):
            return None
        if any(word in operation.type for word in _PRODUCTS) and not flops.get(operation.name):
            if operation.type != "Einsum":
                return None
            total += _einsum_flops(operation)
    return int(total)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _einsum_flops(operation: tf.Operation) -> int:
    """Return the FLOPs of an einsum, which TensorFlow's counter does not know: two per combination of indices.

    Raises:
        ValueError: If a size is unknown.
    """
    subscripts = operation.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(subscripts, operation.inputs, strict=True):
        sizes |= dict(zip(labels, tensor.shape.as_list(), strict=True))
    return 2 * math.prod(sizes.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the deprecation warnings of TensorFlow's counter, which has no successor."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def peak_flops_per_second(strategy: Strategy, model: keras.Model) -> float | None:
    """Return the total dense peak of the GPUs of a strategy, in FLOP/s.

    Args:
        strategy: The strategy of a single process.
        model: The model, whose precision selects the peak.

    Returns:
        The sum; None for logical devices and unknown cards.
    """
    cards = tf.config.list_physical_devices("GPU")
    if len(tf.config.list_logical_devices("GPU")) != len(cards):
        return None
    peaks = []
    for name in strategy.device_names:
        kind, _, index = name.rpartition(":")
        if not kind.endswith("GPU") or int(index) >= len(cards):
            return None
        details = tf.config.experimental.get_device_details(cards[int(index)])
        peaks.append(_peak(str(details.get("device_name")), built_objects.describe_precision(model)))
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _peak(card: str, precision: str) -> float | None:
    peaks = next((row for name, row in PEAKS.items() if card.startswith(name)), None)
    if peaks is None:
        return None
    float32, tensor_float32, half = peaks
    if precision in ("mixed_bfloat16", "mixed_float16", "bfloat16", "float16"):
        return half
    if precision != "float32":
        return None
    return tensor_float32 if tf.config.experimental.tensor_float_32_execution_enabled() else float32

"""One process of `benchmarks.plan_memory`: the predicted memory of all layouts of a model, or the measured one of one.

predict(model, batch, layouts, limits) -> figures    memory, and the largest batch; the model is traced, not trained
train(model, batch, layout, narrower) -> figures     the peaks of a process that trains
"""

from __future__ import annotations

import bisect
import functools
import os
from typing import Any

from benchmarks import process
from tfpar.cluster import process_memory

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import tfpar
from benchmarks.plan_memory_models import BUILD_MODEL, endless
from tfpar.planning.block_measurement import measure_blocks, trace_model, with_bytes
from tfpar.planning.costs import Curve, ModelCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import strategy_of
from tfpar.planning.memory import bytes_of_devices, host_bytes
from tfpar.planning.memory_measurement import model_bytes
from tfpar.reduction.weight_owners import num_bytes

# Threads run the operations of each step in another order.
_DEVICE, _NUM_STEPS = "CPU:0", 12
# How much more a batch of twice the size takes, and the largest batch to look for.
_MOSTLY_EXAMPLES, _MOST_TIMES = 1.5, 4


def predict(model: str, batch: int, layouts: list[dict[str, Any]], limits: list[int]) -> dict[str, float]:
    """Return what is predicted for each layout: its bytes, and the largest batch within a limit relative to the batch.

    The bytes are those of all devices and of the batch on the host together. Where weights and their state are most of
    them, a few percent decide between half and twice the batch: there the largest batch is left out.

    Args:
        model: The name of the model.
        batch: Examples of the global batch.
        layouts: The fields of each layout.
        limits: The limit of each layout, in bytes of all devices and the host together.
    """
    costs, sizes = _costs(model, batch), range(1, _MOST_TIMES * batch)
    found: dict[str, float] = {}
    for layout, limit_bytes in zip((Layout(**one) for one in layouts), limits, strict=True):
        predicted_of = functools.partial(_predicted, layout, costs)
        found[f"predicted {layout}"] = predicted_of(batch)
        if predicted_of(2 * batch) >= _MOSTLY_EXAMPLES * predicted_of(batch):
            found[f"largest batch {layout}"] = bisect.bisect_right(sizes, limit_bytes, key=predicted_of) / batch
    return found


def _predicted(layout: Layout, costs: ModelCosts, batch: int) -> int:
    return sum(bytes_of_devices(layout, costs, batch, shares_memory=True)) + host_bytes(layout, costs, batch)


def _costs(model: str, batch: int) -> ModelCosts:
    built = BUILD_MODEL[model](1)
    examples = next(iter(endless(built, batch)))
    held = model_bytes(built, examples, _DEVICE)
    traced = trace_model(built, _DEVICE, examples)
    assert traced.graph is not None, traced.reason
    blocks = measure_blocks(built, traced, _DEVICE, [batch // 16, batch // 8]).costs
    return ModelCosts(
        name=model,
        num_parameters=built.count_params(),
        weight_bytes=held.weight_bytes,
        trainable_bytes=held.trainable_bytes,
        slot_bytes=held.slot_bytes,
        variable_bytes=tuple(map(num_bytes, built.trainable_variables)),
        batch=batch,
        compute=Curve((batch,), (1.0,)),
        update_seconds=0.0,
        input_bytes=sum(map(_bytes_of, examples)) // batch,
        target_bytes=_bytes_of(examples[1]) // batch,
        working=held.working,
        scratch=held.scratch,
        blocks=with_bytes(blocks, traced, batch, _DEVICE),
    )


def _bytes_of(tensor: tf.Tensor) -> int:
    return int(tf.size(tensor)) * int(tensor.dtype.size)


def train(model: str, batch: int, layout: dict[str, Any], narrower: int) -> dict[str, int]:
    """Train a model, and return the peaks of this process, beyond its memory before, and of TensorFlow's tensors.

    Args:
        model: The name of the model.
        batch: Examples of the global batch.
        layout: The fields of the layout.
        narrower: Divides the widths of the layers.
    """
    strategy = strategy_of(Layout(**layout), ["CPU:0", "CPU:1"])
    with tf.device(_DEVICE):
        tf.function(lambda one: one + 1.0)(tf.zeros([])).numpy()
    before_bytes = process_memory.resident_bytes()
    trainer = tfpar.Trainer(lambda: BUILD_MODEL[model](narrower), strategy, seed=0)
    dataset = endless(trainer.model, batch)
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    process_memory.reset_peak()
    tf.config.experimental.reset_memory_stats(_DEVICE)
    trainer.fit(dataset, steps_per_epoch=_NUM_STEPS, verbose=0)
    return {
        "process_bytes": process_memory.peak_bytes() - before_bytes,
        "tensor_bytes": tf.config.experimental.get_memory_info(_DEVICE)["peak"],
    }


if __name__ == "__main__":
    request = process.request()
    tfpar.use_logical_cpus(2)
    reply = train(**request) if "layout" in request else predict(**request)
    process.reply(reply)
    os._exit(0)  # as benchmarks.worker

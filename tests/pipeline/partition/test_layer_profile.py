"""The measured costs of layer calls: compiled, without the cost of a call, and each kind of call once."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.util import deprecation

from tfpar.pipeline.graph.tracing import Graph, trace
from tfpar.pipeline.partition import layer_profile
from tfpar.pipeline.partition.layer_profile import CallCost, measure

pytestmark = pytest.mark.usefixtures("logical_cpus")


class Noting(layers.Layer):
    """A layer that notes whether it runs compiled."""

    noted: ClassVar[list[bool]] = []

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, keras.KerasTensor):
            self.noted.append(not tf.executing_eagerly())
        return inputs + 1.0


def graph_of(*inside: Any, width: int = 4) -> Graph:
    return trace(keras.Sequential([keras.Input((width,)), *inside]))


def costs_of(graph: Graph, inputs: Any, **settings: bool) -> list[CallCost]:
    return measure(graph, [tf.constant(inputs)], 2, "CPU:0", **{"times": True, "flops": False, **settings})


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """What the clock shows for forward and backward: first of an empty function, then of each measured layer call."""
    clock: list[tuple[float, float]] = []
    monkeypatch.setattr(layer_profile, "_shortest", lambda run, sources: (run(), clock.pop(0))[1])
    return clock


def test_the_seconds_of_an_empty_function_are_subtracted(seconds: list[tuple[float, float]]) -> None:
    seconds += [(1.0, 2.0), (5.0, 7.0), (0.5, 2.5)]
    first, second = costs_of(graph_of(layers.Dense(4), layers.ReLU()), np.ones((1, 4), "float32"))
    assert (first.forward_seconds, first.backward_seconds) == (4.0, 5.0)
    assert (second.forward_seconds, second.backward_seconds) == (0.0, 0.5), "never below zero"


def test_equal_layers_with_equal_shapes_are_measured_once(seconds: list[tuple[float, float]]) -> None:
    seconds += [(0.0, 0.0), (1.0, 2.0), (3.0, 4.0)]
    costs = costs_of(graph_of(layers.Dense(4), layers.Dense(4), layers.Dense(8)), np.ones((1, 4), "float32"))
    assert [cost.forward_seconds for cost in costs] == [1.0, 1.0, 3.0]
    assert not seconds


def test_layer_calls_run_compiled_and_are_traced_once_for_all_equal_ones() -> None:
    graph = graph_of(*(Noting() for _ in range(5)))
    Noting.noted.clear()
    costs_of(graph, np.ones((1, 4), "float32"))
    assert Noting.noted.count(True) == 1, "traces"
    assert Noting.noted.count(False) == 5, "one run each, for the inputs of the next"


def test_masks_reach_compiled_layers_and_the_layers_after_them() -> None:
    class Masked(layers.Layer):
        supports_masking = True
        seen: ClassVar[list[bool]] = []

        def call(self, inputs: Any, mask: Any = None) -> Any:
            if not isinstance(inputs, keras.KerasTensor):
                self.seen.append(mask is not None)
            return inputs

    inside = [layers.Embedding(9, 4, mask_zero=True), Masked(), layers.LSTM(3)]
    costs = measure(
        trace(keras.Sequential([keras.Input((5,), dtype="int32"), *inside])),
        [tf.constant([[1, 2, 0, 0, 0]])],
        2,
        "CPU:0",
        times=True,
        flops=False,
    )
    assert Masked.seen
    assert all(Masked.seen)
    assert costs[-1].forward_seconds > 0


def test_operations_are_counted_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("tensorflow"), "handle", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(deprecation, "_PRINTED_WARNING", {})  # it warns once in a process
    dense, _ = costs_of(graph_of(layers.Dense(8), layers.ReLU()), np.ones((1, 4), "float32"), times=False, flops=True)
    assert dense.flops == 2 * 2 * 4 * 8 + 2 * 8, "products and sums for two examples, and the bias"
    assert dense.forward_seconds == dense.backward_seconds == 0
    assert not said


def test_the_clock_is_read_after_the_gpus_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = layer_profile.time.perf_counter
    monkeypatch.setattr(layer_profile.time, "perf_counter", lambda: (events.append("clock"), clock())[1])
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: events.append("wait"))
    costs_of(graph_of(layers.Dense(4)), np.ones((1, 4), "float32"))
    assert events == ["clock", "wait", "clock", "wait", "clock"] * (len(events) // 5)
    assert len(events) == 2 * 5 * (layer_profile._REPEATS + 1), "of an empty function, and of the layer call"

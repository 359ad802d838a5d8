"""The reading of a graph finds what TensorFlow would place on the host, and what it would copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.support.device_placement import Reading, read_placement

pytestmark = pytest.mark.usefixtures("logical_cpus")
GPUS = {"CPU:1": "GPU:0", "CPU:2": "GPU:1"}


def read(function: Callable[..., Any], *arguments: Any) -> Reading:
    return read_placement(tf.function(function, autograph=False).get_concrete_function(*arguments), GPUS)


def unique(x: tf.Tensor) -> tf.Tensor:
    """Unlike tf.unique, it has a kernel for CPUs only."""
    return tf.raw_ops.UniqueV2(x=x, axis=[0])[0]


def devices(reading: Reading, kind: str) -> list[str]:
    return [one.device for one in reading.operations if one.kind == kind]


def test_an_operation_without_a_kernel_for_gpus_lies_between_two_that_have_one() -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:2"):
            return unique(tf.abs(x)) + 1.0

    reading = read(function, tf.zeros([4]))
    assert [(one.kind, one.device) for one in reading.on_host] == [("UniqueV2", "CPU:0")]
    assert devices(reading, "Abs") == devices(reading, "AddV2") == ["GPU:1"]


def test_an_operation_of_the_host_at_the_end_or_beginning_is_between_nothing() -> None:
    assert not read(lambda x: unique(tf.abs(x)), tf.zeros([4])).on_host
    assert not read(lambda x: tf.abs(unique(x)), tf.zeros([4])).on_host


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_bounds_in_int64_are_computed_on_a_gpu_and_awaited(dtype: str) -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            size = tf.shape(x, dtype)[0]
            return x[: size // tf.constant(2, dtype)]

    waits = read(function, tf.TensorSpec([None])).waits
    assert {(one.dtype, one.origin, one.consumer_kind) for one in waits} == (
        set() if dtype == "int32" else {("int64", "GPU:0", "StridedSlice")}
    )
    assert all("int64" in str(one) for one in waits)


def test_a_predicate_of_a_condition_on_a_gpu_is_awaited() -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        branches = [lambda: x, lambda: -x]
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.abs(x), lambda: tf.switch_case(tf.constant(2), branches))

    reading = read(function, tf.zeros([4]))
    assert [(one.source_kind, one.consumer_kind) for one in reading.waits] == [("Greater", "Switch")]
    assert devices(reading, "Abs") == devices(reading, "Neg") == ["GPU:0"]  # both branches, and branches of those


def test_a_loop_has_its_variables_where_their_first_values_are() -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:2"):
            first = tf.abs(x)
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), (0, first))[1]

    reading = read(function, tf.zeros([4]))
    places = {one.name.rpartition("/")[2]: one.device for one in reading.operations if one.kind == "Switch"}
    assert "GPU:1" in places.values()
    assert not reading.waits  # the counter is int32, on the host
    # The body requests no device, so it runs on the first GPU: each iteration goes there and back.
    assert {(one.origin, one.target) for one in reading.moves} == {("GPU:1", "GPU:0"), ("GPU:0", "GPU:1")}


def test_a_tensor_on_its_way_to_another_gpu_makes_a_detour() -> None:
    def function(x: tf.Tensor, placed: bool) -> tf.Tensor:
        with tf.device("CPU:0" if placed else None):
            part = x[1:] * 2.0
        with tf.device("CPU:2"):
            return tf.abs(part)

    assert [one.source_kind for one in read(function, tf.zeros([4]), False).detours] == ["Mul"]
    reading = read(function, tf.zeros([4]), True)
    assert not reading.detours
    assert devices(reading, "Mul") == ["CPU:0"]


def test_variables_hold_their_operations_on_their_device() -> None:
    with tf.device("CPU:2"):
        variable = tf.Variable(tf.zeros([4]))
    reading = read(lambda: variable.assign_add(tf.ones([4]) + variable))
    assert devices(reading, "AssignAddVariableOp") == ["GPU:1"]
    assert devices(reading, "AddV2") == ["GPU:0"]


def test_functions_that_are_called_take_the_device_of_the_call() -> None:
    inner = tf.function(lambda x: tf.abs(x))

    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:2"):
            return inner(x)

    assert devices(read(function, tf.zeros([4])), "Abs") == ["GPU:1"]


def test_entries_count_the_tensors_that_are_made_of_a_batch() -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([4]), tf.zeros([4])))

    def function(upcoming: tf.experimental.Optional) -> Any:
        with tf.device("CPU:0"):
            images, labels = upcoming.get_value()
            halves = images[:2], images[2:]
        with tf.device("CPU:1"):
            first = tf.abs(halves[0]) + tf.sign(halves[0]) + tf.abs(labels[0])
        with tf.device("CPU:2"):
            return first, tf.abs(halves[0]) + tf.abs(halves[1])

    entries = read(function, iter(dataset).get_next_as_optional()).entries
    assert entries == {(0, "GPU:0"): 1, (0, "GPU:1"): 2, (1, "GPU:0"): 1}

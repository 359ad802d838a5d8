"""On GPUs of Hopper and newer, convolutions keep the layout of the model; the GPUs are made up."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfpar._compat.graphs import tf_function, tf_layout

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """A machine with two GPUs; return the compute capability of each."""
    capabilities = {"GPU:0": (9, 0), "GPU:1": (10, 0)}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(capabilities))
    details = tf.config.experimental
    monkeypatch.setattr(details, "get_device_details", lambda gpu: {"compute_capability": capabilities[gpu]})
    return capabilities


def options() -> Any:
    """Those of functions that this thread calls."""
    serialized = context.context().function_call_options.config_proto_serialized
    return tf.compat.v1.ConfigProto.FromString(serialized).graph_options.rewrite_options


def test_the_layout_optimizer_is_off_inside_the_context_alone() -> None:
    with tf_layout.best_for_gpus():
        assert options().layout_optimizer == options().OFF
    assert options().layout_optimizer == options().DEFAULT


def test_an_older_gpu_or_none_keeps_it(hopper: dict[str, tuple[int, int]]) -> None:
    hopper["GPU:1"] = (8, 6)
    with tf_layout.best_for_gpus():
        assert options().layout_optimizer == options().DEFAULT
    hopper.clear()
    with tf_layout.best_for_gpus():
        assert options().layout_optimizer == options().DEFAULT


def test_it_is_off_for_the_short_optimization_of_a_pipeline_too() -> None:
    with tf_function.short_graph_optimization(), tf_layout.best_for_gpus():
        assert "remap" in options().optimizers
        assert "layout" not in options().optimizers


def test_the_choice_of_a_user_is_kept() -> None:
    try:
        tf.config.optimizer.set_experimental_options({"layout_optimizer": True})
        with tf_layout.best_for_gpus():
            assert options().layout_optimizer == options().ON
    finally:
        tf.config.optimizer.set_experimental_options({})
        context.context()._optimizer_experimental_options.pop("layout_optimizer", None)
        context.context()._thread_local_data.function_call_options = None

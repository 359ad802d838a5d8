"""Steps of pipelines leave out most passes of TensorFlow's graph optimizer, and change no options of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpar

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def graph_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What TensorFlow shall do to graphs: set what a user would, and read what a function called now would get."""
    here = context.context()

    def read(**chosen: bool) -> Any:
        monkeypatch.setattr(here, "_optimizer_experimental_options", chosen)
        here.function_call_options = None  # read again, as after tf.config.optimizer.set_experimental_options
        with tfpar.Pipeline(1, 1).step_context():
            serialized = here.function_call_options.config_proto_serialized
        return tf.compat.v1.ConfigProto.FromString(serialized).graph_options.rewrite_options

    yield read
    monkeypatch.undo()
    here.function_call_options = None


def test_only_steps_leave_out_most_passes_of_the_graph_optimizer(
    graph_options: Callable[..., Any],
) -> None:
    assert "constfold" in graph_options().optimizers
    after = context.context().function_call_options.config_proto_serialized
    assert not tf.compat.v1.ConfigProto.FromString(after).graph_options.rewrite_options.ByteSize()


def test_a_users_options_of_the_graph_optimizer_stay(graph_options: Callable[..., Any]) -> None:
    chosen = graph_options(constant_folding=False)
    assert chosen.constant_folding == chosen.OFF
    assert not chosen.optimizers

"""Messages of gradients: their order, their packs, their ordering tokens, and where factors are sent in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.properties.test_graphs_of_steps import needs
from tfpar.engines.workers import collectives, sufficient_factors
from tfpar.engines.workers.collectives import Group
from tfpar.reduction.gradients.all_reduce import all_reduce_gradients
from tfpar.reduction.gradients.gradient_order import compute_early

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


class Tied(keras.layers.Layer):
    """Uses one kernel twice, the second time transposed, and adds a branch to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = keras.layers.Dense(200)

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(shape=(200, 200))

    def call(self, inputs: Any) -> Any:
        hidden = keras.ops.relu(keras.ops.matmul(inputs, self.kernel))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.kernel)) + self.branch(hidden) + inputs


def models() -> Iterator[Any]:
    layers = keras.layers
    sequence = keras.Input((6, 200))
    yield "tied", [keras.Input((200,)), Tied(), Tied()]
    yield "attention", [sequence, Attends(), layers.Dense(200)]
    yield "lstm", [keras.Input((6, 200)), layers.LSTM(200, return_sequences=True), layers.GRU(100)]
    yield "depthwise", [keras.Input((6, 6, 64)), layers.SeparableConv2D(512, 3), layers.Conv2DTranspose(64, 3)]


class Attends(keras.layers.Layer):
    """Self-attention with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(4, 50)

    def call(self, inputs: Any) -> Any:
        return inputs + self.attention(inputs, inputs)


@pytest.mark.parametrize("name", ["tied", "attention", "lstm", "depthwise"])
def test_the_order_changes_no_gradient(name: str) -> None:
    """Nor does it make a cycle: the gradients of a layer that has several uses or a loop, of branches and residuals."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(dict(models())[name])
    inputs = tf.random.stateless_normal([2, *model.input_shape[1:]], [1, 2])
    weights = [weight.value for weight in model.trainable_variables]

    def gradients(early: bool) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(inputs)))
        found: list[tf.Tensor] = tape.gradient(loss, weights)
        if early:
            compute_early(found, loss)
        return found

    as_they_are, ordered = (tf.function(gradients, autograph=False)(early) for early in (False, True))
    for one, other in zip(as_they_are, ordered, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def test_packs_are_sent_in_the_order_in_which_the_backward_pass_completes_them() -> None:
    """Neither mixed types nor a large gradient in the middle end a pack; what is summed in another way has its turn."""
    sent: list[Any] = []

    class Context:
        num_replicas_in_sync = 2

        def all_reduce(self, _: Any, message: tf.Tensor) -> tf.Tensor:
            sent.append(sorted(set(message.numpy().tolist())))
            return message

    def own_sum() -> tf.Tensor:
        sent.append("own")
        return tf.constant(5.0)

    gradients: list[Any] = [tf.fill([4], float(number)) for number in range(8)]
    gradients[1] = tf.fill([2], tf.constant(1.0, tf.float64))
    gradients[3] = None
    gradients[4] = tf.fill([100], 4.0)
    gradients[5] = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "get_replica_context", Context)
        sums = all_reduce_gradients(gradients, pack_bytes=48, own_sums={5: own_sum})
    # 7, 6 and 2 fill a pack of 48 bytes, which is complete after 2.
    assert sent == ["own", [4.0], [2.0, 6.0, 7.0], [1.0], [0.0]]
    assert [None if one is None else float(tf.reshape(one, [-1])[0]) for one in sums] == [0, 1, 2, None, 4, 5, 6, 7]


# Ordering tokens


def test_all_groups_of_a_device_share_the_order_of_nccl() -> None:
    """Otherwise two processes could start them in different orders, and each wait for the other."""
    first, second = (Group(["CPU:0"], num_members=2, implementation="nccl") for _ in range(2))

    @tf.function(autograph=False)
    def both(tensor: tf.Tensor) -> tf.Tensor:
        return first.all_reduce(tensor), second.all_reduce(tensor)

    shape = [collectives.GATHER_BYTES]
    graph = both.get_concrete_function(tf.TensorSpec(shape)).graph
    earlier, later = (op for op in graph.get_operations() if op.type == "CollectiveReduceV2")
    assert earlier in needs(later)


# Sufficient factors


@pytest.mark.parametrize(
    ("types", "equal", "deterministic", "gigabytes_per_second", "expected"),
    [
        (["CPU"], True, False, None, True),
        (["CPU"], False, False, None, False),
        (["GPU", "GPU"], True, False, None, False),
        (["GPU", "GPU"], True, True, 1.2, True),  # 10-gigabit Ethernet
        (["GPU", "GPU"], True, True, 12.0, True),  # 100-gigabit Ethernet
        (["GPU", "GPU"], True, True, 150.0, False),  # NVLink
        (["GPU"], False, True, None, False),
    ],
)
def test_gpus_use_factors_only_with_deterministic_operations_and_a_slow_network(
    types: list[str], equal: bool, deterministic: bool, gigabytes_per_second: float | None, expected: bool
) -> None:
    def measure() -> float:
        assert gigabytes_per_second is not None, "the choice needs no measurement"
        return 1e9 * gigabytes_per_second

    assert sufficient_factors.are_used(types, equal, deterministic, measure) is expected

"""The order of gradients and their all-reduces in the graph of a step: those of the last layers begin first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.reduction.gradient_order import compute_early
from tfpar.reduction.gradients import all_reduce_gradients
from tfpar.strategies.multi_worker import collectives, sufficient_factors
from tfpar.strategies.multi_worker.collectives import Group

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DEVICES = ["CPU:0", "CPU:1"]


def build_cnn() -> keras.Model:
    """The kernel of the first Dense layer, 288 x 64, is larger than `PACK_BYTES`; all other weights are smaller."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


PACK_BYTES = 64 << 10


def images() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    pairs = rng.random((16, 8, 8, 1), "float32"), rng.integers(0, 3, 16)
    return tf.data.Dataset.from_tensor_slices(pairs).batch(8)


def graph_of_step(strategy: tfpar.Strategy) -> tf.Graph:
    """Return the graph of a train step of the CNN, after one epoch."""
    trainer = tfpar.Trainer(build_cnn, strategy, seed=0)
    trainer.fit(images(), verbose=0)
    dataset = strategy.distribute(images()).dataset
    step = tf.function(lambda *batch: strategy.train_step(trainer.model, batch), autograph=False)
    graph: tf.Graph = step.get_concrete_function(*dataset.element_spec[:-1]).graph  # without the digest
    return graph


def needs(op: tf.Operation) -> set[tf.Operation]:
    """Return all operations that must run before one."""
    found, waiting = set(), [op]
    while waiting:
        here = waiting.pop()
        new = {*(tensor.op for tensor in here.inputs), *here.control_inputs} - found
        found |= new
        waiting += new
    return found


def large_message(graph: tf.Graph) -> tf.Operation:
    """Return the collective of the first replica with the gradient of the large kernel, or with its factors."""
    collective = ("CollectiveReduceV2", "CollectiveGatherV2")
    sizes = {op: op.inputs[0].shape.num_elements() for op in graph.get_operations() if op.type in collective}
    # The shape of factors is unknown.
    return next(op for op, size in sizes.items() if size is None or size >= PACK_BYTES // 4)


@pytest.fixture(params=[1, 4], ids=["one stream", "four streams"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL, and as with a ring."""
    monkeypatch.setattr(collectives, "NUM_STREAMS", request.param)


@pytest.mark.parametrize("factors", [False, True], ids=["all-reduce", "factors"])
def test_the_message_of_the_last_layers_needs_no_gradient_of_the_first(
    factors: bool, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sufficient_factors, "are_used", lambda *_: factors)
    message = large_message(graph_of_step(tfpar.MultiWorker(DEVICES, pack_bytes=PACK_BYTES)))
    assert factors == ("Pad" in {op.type for op in needs(message)})
    backward = [op.type for op in needs(message) if "gradient_tape" in op.name and "conv2d" in op.name]
    assert backward == []


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tfpar.Mirrored(DEVICES),
        lambda: tfpar.MultiWorker(DEVICES, pack_bytes=PACK_BYTES),
        lambda: tfpar.MultiWorker(DEVICES, pack_bytes=PACK_BYTES, compression="bfloat16"),
    ],
    ids=["Mirrored", "MultiWorker", "compression"],
)
@pytest.mark.parametrize("factors", [False, True], ids=["all-reduce", "factors"])
def test_the_backward_pass_continues_after_the_gradient_of_a_large_kernel(
    strategy: Callable[[], tfpar.Strategy], factors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's executor would otherwise compute the kernel's gradient last."""
    monkeypatch.setattr(sufficient_factors, "are_used", lambda *_: factors)
    graph = graph_of_step(strategy())
    gradients = [op for op in graph.get_operations() if op.type == "Conv2DBackpropFilter"]
    assert len(gradients) == 2
    for gradient in gradients:
        kernels = [
            op
            for op in needs(gradient)
            if (op.type == "MatMul" and op.outputs[0].shape == (288, 64)) or (op.type == "PadV2" or op.type == "Pad")
        ]
        assert len(kernels) == 1


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


# Packs


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


def test_groups_of_a_cpu_do_not_wait_for_each_other() -> None:
    first, second = (Group(["CPU:0"], num_members=2) for _ in range(2))

    @tf.function(autograph=False)
    def both(tensor: tf.Tensor) -> tf.Tensor:
        return first.all_reduce(tensor), second.all_reduce(tensor)

    graph = both.get_concrete_function(tf.TensorSpec([collectives.GATHER_BYTES])).graph
    earlier, later = (op for op in graph.get_operations() if op.type == "CollectiveReduceV2")
    assert earlier not in needs(later)


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


def test_the_bandwidth_of_an_all_reduce_is_measured() -> None:
    assert 1e6 < sufficient_factors.bandwidth(Group(DEVICES, num_members=2), num_local=2) < 1e12


@pytest.mark.parametrize(
    ("shape", "num_rows", "num_threads", "expected"),
    [
        ((2048, 2048), 32, 1, True),
        ((9216, 128), 128, 1, True),
        ((2048, 2048), 1024, 1, False),  # the product takes longer than the all-reduce
        ((2048, 2048), 1024, 8, True),
        ((2048, 10), 32, 1, False),  # the factors are larger than the product
        ((2048, 10), 32, 64, False),
    ],
)
def test_factors_are_gathered_where_that_takes_less_time(
    shape: tuple[int, int], num_rows: int, num_threads: int, expected: bool
) -> None:
    @tf.function(autograph=False)
    def gradient(inputs: tf.Tensor, output_gradient: tf.Tensor) -> tf.Tensor:
        product = tf.matmul(inputs, output_gradient, transpose_a=True)
        factors = sufficient_factors.sufficient_factors_of(product, num_rows, num_threads)
        found.append(factors is not None)
        return product

    found: list[bool] = []
    gradient.get_concrete_function(*(tf.TensorSpec([None, columns]) for columns in shape))
    assert found == [expected]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([None, 2048], True),
        ([None, 2, 1024], True),  # flattened: a row for each example
        ([None, 4, 2048], True),
        ([None, 64, 2048], False),  # the product of 32 * 64 rows takes longer than the all-reduce
        ([None, None, 2048], False),
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_are_counted_where_an_example_has_several(shape: list[int | None], layer: int, expected: bool) -> None:
    @tf.function(autograph=False)
    def gradient(inputs: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            tape.watch([first, second])
            hidden = tf.nn.relu(tf.matmul(tf.reshape(tf.nn.relu(inputs), [-1, 2048]), first))
            loss = tf.reduce_sum(tf.matmul(hidden, second) ** 2)
        product = tape.gradient(loss, [first, second])[layer]
        found.append(sufficient_factors.sufficient_factors_of(product, 32) is not None)

    found: list[bool] = []
    kernel = tf.TensorSpec([2048, 2048])
    gradient.get_concrete_function(tf.TensorSpec(shape), kernel, kernel)
    assert found == [expected]

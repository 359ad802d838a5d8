"""The graph of a step hardly grows with the number of micro-batches, and no action waits for a whole loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar._compat import keras_optimizer

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def model_with_states() -> keras.Model:
    """A model with Dropout, an embedding and an added loss, whose states, rows and sums a loop must carry."""
    tokens = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(7, 4)(tokens))
    hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(8, "tanh")(hidden))
    hidden = keras.layers.ActivityRegularization(l2=0.01)(keras.layers.Dense(8)(hidden))
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def graph_of(schedule: str, num_microbatches: int, step: str) -> tf.Graph:
    """The graph of a step."""
    num_stages, devices = (4, ["CPU:0", "CPU:1"]) if schedule == "interleaved" else (2, None)
    strategy = tfpar.Pipeline(num_stages, num_microbatches, schedule, balance="parameters", devices=devices)
    trainer = tfpar.Trainer(model_with_states, strategy, seed=0)
    features = np.arange(192, dtype="int32").reshape(64, 3) % 7
    batch = trainer.build(tf.data.Dataset.from_tensor_slices((features, features[:, 0] % 2)).batch(64))
    trainer.fit(features, features[:, 0] % 2, batch_size=64, verbose=0)
    run = {
        "train": lambda: strategy.train_step(trainer.model, batch),
        "evaluate": lambda: strategy.evaluate_step(trainer.model, batch),
    }[step]
    return tf.function(run, autograph=False).get_concrete_function().graph


def num_operations(schedule: str, num_microbatches: int, step: str) -> int:
    """The number of operations in the graph of a step, those of all functions included."""
    graph = graph_of(schedule, num_microbatches, step).as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "step"),
    [("1f1b", "train"), ("1f1b", "evaluate"), ("gpipe", "train"), ("zero_bubble", "train"), ("interleaved", "train")],
)
def test_a_micro_batch_adds_to_the_graph_only_its_rows_of_the_embedding(schedule: str, step: str) -> None:
    few, many = (num_operations(schedule, count, step) for count in (8, 32))
    assert many - few <= (3 * (32 - 8) if step == "train" else 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
def test_an_action_after_a_loop_waits_for_its_own_device_alone(schedule: str) -> None:
    # A control dependency on one result of a loop is one on all of them: the actions after the loop waited for the last
    # backward pass of every device.
    operations = graph_of(schedule, 8, "train").get_operations()
    assert any(operation.type.endswith("While") for operation in operations)
    waiting = [
        operation.name
        for operation in operations
        if any(before.type.endswith("While") for before in operation.control_inputs)
        and all(
            given.dtype != tf.resource for given in operation.inputs
        )  # updates of metrics are in TensorFlow's order
    ]
    assert waiting == []


def test_a_step_reads_the_learning_rate_once_for_all_weights() -> None:
    optimizer, weights = keras.optimizers.SGD(0.1), [keras.Variable(tf.zeros([2])) for _ in range(3)]
    optimizer.build(weights)

    @tf.function
    def apply() -> None:
        with keras_optimizer.one_device_optimizer():
            optimizer.apply([tf.ones([2])] * 3, weights)

    graph = apply.get_concrete_function().graph
    handles = {id(inside): outside for outside, inside in graph.captures}
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    of_rate = [op for op in reads if handles.get(id(op.inputs[0])) is optimizer.learning_rate.value.handle]
    assert len(of_rate) == 1
    assert [float(weight[0]) for weight in weights] == [0.0] * 3
    apply()
    assert [float(weight[0]) for weight in weights] == pytest.approx([-0.1] * 3)

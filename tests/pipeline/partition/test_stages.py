"""Stages: the values that cross each cut, the owners of weights, and the output of stages run in order."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support import architectures
from tests.support.architectures import equal_balance, run_stages
from tests.support.extent import sampled
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, Value, trace
from tfpar.pipeline.partition.stages import (
    Stage,
    bytes_per_example,
    cut_values,
    split_graph,
    variable_owners,
    variable_readers,
)

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def cut_names(graph: Graph) -> list[list[str]]:
    return [[value.name for value in values] for values in cut_values(graph)]


def input_names(stages: tuple[Stage, ...]) -> list[list[str]]:
    return [[value.name for value in stage.inputs] for stage in stages]


def output_names(stages: tuple[Stage, ...]) -> list[list[str]]:
    return [[value.name for value in stage.outputs] for stage in stages]


def skip_connections() -> keras.Model:
    """Return entry ─ a ─ b ─ c ─ d, with skip connections from a to b and c, and from entry to d."""
    entry = keras.Input((4,), name="entry")
    first = layers.Dense(4, name="a")(entry)
    second = layers.Add(name="b")([layers.Dense(4, name="b0")(first), first])
    third = layers.Add(name="c")([layers.Dense(4, name="c0")(second), first])
    return keras.Model(entry, layers.Add(name="d")([third, entry]))


# --- values at cuts ---------------------------------------------------------------------------------------------------


def test_a_value_crosses_every_cut_before_its_last_use() -> None:
    graph = trace(skip_connections())
    assert [call.name for call in graph.calls] == ["a", "b0", "b", "c0", "c", "d"]
    assert cut_names(graph) == [["a"], ["a", "b0"], ["a", "b"], ["a", "c0"], ["c"]]


def test_outputs_of_the_model_cross_all_later_cuts() -> None:
    entry = keras.Input((4,))
    early = layers.Dense(4, name="early")(entry)
    model = keras.Model(entry, [early, layers.Dense(4, name="late")(layers.Dense(4, name="middle")(early))])
    assert cut_names(trace(model)) == [["early"], ["early", "middle"]]


def test_a_value_is_transferred_directly_to_each_stage_that_reads_it() -> None:
    stages = split_graph(trace(skip_connections()), [1, 2, 1, 2])
    assert input_names(stages) == [["entry"], ["a"], ["b"], ["c0", "a", "entry"]]
    assert output_names(stages) == [["a"], ["b"], ["c0"], ["d"]]


def test_the_last_stage_receives_every_output_of_the_model() -> None:
    entry = keras.Input((4,), name="entry")
    early = layers.Dense(4, name="early")(entry)
    late = layers.Dense(4, name="late")(layers.Dense(4, name="middle")(early))
    model = keras.Model(entry, {"late": late, "early": early, "entry": entry, "again": early})
    stages = split_graph(trace(model), [1, 1, 1])
    assert input_names(stages) == [["entry"], ["early"], ["middle", "early", "entry"]]
    assert output_names(stages) == [["early"], ["middle"], ["early", "entry", "late"]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Value("image", (None, 28, 28, 1), "float32"), 28 * 28 * 4),
        (Value("open", (None, None, 3), "bfloat16"), 6),
        (Value("scalar", (None,), "int64"), 8),
        (Value("mask", (None, 7), "bool"), 7),
        (Value("complex", (None, 2), "complex64"), 16),
        (Value("no batch", (), "float64"), 8),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_bytes_of_an_example(value: Value, expected: int) -> None:
    assert bytes_per_example(value) == expected


@pytest.mark.parametrize("balance", [[6, 1], [7, 0], [], [-1, 7], [6, 0]])
def test_a_balance_of_another_number_of_calls_is_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1 layer call, 6 in total, received .* in total"):
        split_graph(trace(skip_connections()), balance)


# --- weights of several stages ----------------------------------------------------------------------------------------


class Tied(layers.Layer):
    """A projection onto the vectors of an embedding."""

    def __init__(self, embedding: layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, ops.transpose(self.embedding.embeddings))


def tied() -> keras.Model:
    entry = keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(9, 4, name="embed")
    return keras.Model(entry, Tied(embedding, name="project")(layers.Dense(4, name="hidden")(embedding(entry))))


def test_the_first_stage_that_reads_a_weight_owns_it() -> None:
    model = tied()
    stages = split_graph(trace(model), [1, 1, 1])
    embeddings, *hidden = model.trainable_variables
    assert variable_owners(stages) == {id(embeddings): 0, **{id(v): 1 for v in hidden}}
    assert variable_readers(stages) == {id(embeddings): (0, 2), **{id(v): (1,) for v in hidden}}


# --- the output of the stages -----------------------------------------------------------------------------------------


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *(layers.Dense(4, "relu") for _ in range(5))])


def several_inputs_and_outputs() -> keras.Model:
    entries = {"left": keras.Input((4,), name="left"), "right": keras.Input((2,), name="right")}
    left, right = layers.Dense(4)(entries["left"]), layers.Dense(4)(entries["right"])
    total = layers.Add()([left, right])
    return keras.Model(entries, {"total": layers.Dense(1)(total), "parts": [right, entries["left"]], "both": total})


def nested_and_used_twice() -> keras.Model:
    entry = keras.Input((4,))
    inner_entry = keras.Input((4,))
    inner = keras.Model(inner_entry, layers.BatchNormalization()(layers.Dense(4)(inner_entry)) + inner_entry)
    return keras.Model(entry, inner(layers.Dense(4)(inner(entry))))


def masked() -> keras.Model:
    entry = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(entry)
    hidden = layers.LSTM(4, return_sequences=True)(layers.Dropout(0.2, seed=1)(hidden))
    return keras.Model(entry, layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 2)(hidden, hidden)))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = layers.Embedding(9, 4), layers.Dropout(0.5, seed=2)
        self.blocks = [layers.Dense(4, "gelu") for _ in range(3)]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + self.drop(block(hidden), training=training)
        return ops.matmul(hidden, ops.transpose(self.embed.embeddings))


WORDS = np.array([[3, 1, 2, 0, 0], [5, 0, 0, 0, 0], [1, 2, 3, 4, 5]], "int32")
MODELS: dict[Any, Any] = {
    sequential: numbers(3, 4),
    skip_connections: numbers(3, 4),
    several_inputs_and_outputs: {"left": numbers(3, 4), "right": numbers(3, 2)},
    nested_and_used_twice: numbers(3, 4),
    tied: WORDS,
    masked: WORDS,
    Subclassed: WORDS,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_the_stages_run_in_order_give_the_output_of_the_model(build: Any, training: bool) -> None:
    keras.utils.set_random_seed(0)
    model, inputs = build(), MODELS[build]
    model(inputs)
    start = [variable.numpy() for variable in model.variables]
    expected = model(inputs, training=training)
    updated = [variable.numpy() for variable in model.variables]
    graph = trace(model, inputs)
    tensors = model_graph.standardize(model, inputs)
    for num_stages in range(1, len(graph.calls) + 1):
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        stages = split_graph(graph, equal_balance(len(graph.calls), num_stages))
        found = run_stages(graph, stages, tensors, training)
        keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
        for variable, value in zip(model.variables, updated, strict=True):
            np.testing.assert_array_equal(variable, value, variable.path)


def test_the_last_stage_gives_the_mask_of_an_output() -> None:
    entry = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(entry)
    model = keras.Model(entry, layers.Dense(2)(layers.LSTM(4, return_sequences=True)(hidden)))
    graph = trace(model)
    found = run_stages(graph, split_graph(graph, [2, 1, 1]), [tf.constant(WORDS)])
    np.testing.assert_array_equal(found._keras_mask, WORDS != 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", architectures.DIFFERENT)
def test_architectures_give_the_unsplit_output_in_2_4_and_8_stages(name: str) -> None:
    architectures.check(name)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "num_stages"), sampled(architectures.RUN_IN_THE_SUITE.items(), of_ci=[("MobileNet", 2)])
)
def test_architectures_train_and_predict(name: str, num_stages: int) -> None:
    architectures.run(name, num_stages)

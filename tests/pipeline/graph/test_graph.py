"""Tracing of Keras models: the names and order of layer calls, and the outputs of the graph."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, trace

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def spec(*shape: int | None, dtype: str = "float32") -> keras.KerasTensor:
    return keras.KerasTensor((None, *shape), dtype)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def names(graph: Graph) -> list[str]:
    return [call.name for call in graph.calls]


def applied(model: keras.Model, inputs: Any, training: bool = False, specs: Any = None) -> Any:
    """Return the outputs of a model's graph."""
    graph = trace(model, specs)
    tensors = dict(zip(graph.inputs, model_graph.standardize(model, inputs), strict=True))
    model_graph.run(graph.calls, tensors, training)
    return keras.tree.map_structure(tensors.get, graph.outputs)


def assert_same(found: Any, expected: Any) -> None:
    keras.tree.assert_same_structure(found, expected)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        np.testing.assert_array_equal(one, other)


class Own(keras.Model):
    """A model with the `call` of a test; layers and weights are its attributes."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__(name=attributes.pop("name", None))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.function(self, inputs, training)


# --- names and order --------------------------------------------------------------------------------------------------


def test_nested_models_are_traced_at_any_depth() -> None:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="dense")], name="inner")
    entry = keras.Input((4,))
    encoder = keras.Model(entry, layers.ReLU(name="relu")(inner(entry)), name="encoder")
    model = keras.Sequential([keras.Input((4,)), encoder, layers.Dense(2, name="head")])
    assert names(trace(model)) == ["encoder/inner/dense", "encoder/relu", "head"]
    assert_same(applied(model, numbers(3, 4)), model(numbers(3, 4)))


def test_a_nested_model_of_several_inputs_is_opened() -> None:
    """Keras gives it a mask of None for each input."""
    entries = {"left": keras.Input((4,), name="left"), "right": keras.Input((4,), name="right")}
    parts = [layers.Dense(3, name=f"{name}_dense")(entry) for name, entry in entries.items()]
    total = layers.Add(name="add")(parts)
    inner = keras.Model(entries, {"total": total, "half": layers.ReLU(name="relu")(total)}, name="inner")
    outer = {name: keras.Input((4,), name=name) for name in entries}
    outputs = inner(outer)
    model = keras.Model(outer, layers.Dense(2, name="head")(outputs["half"]))
    assert names(trace(model)) == ["inner/left_dense", "inner/right_dense", "inner/add", "inner/relu", "head"]
    inputs = {"left": numbers(5, 4), "right": numbers(5, 4, seed=1)}
    assert_same(applied(model, inputs), model(inputs))


def test_further_calls_of_a_layer_are_numbered_and_share_it() -> None:
    encoder = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="dense")], name="encoder")
    head = layers.Dense(4, name="head")
    entry = keras.Input((4,))
    model = keras.Model(entry, head(encoder(head(encoder(entry)))))
    graph = trace(model)
    assert names(graph) == ["encoder/dense", "head", "encoder/dense#2", "head#2"]
    assert graph.calls[0].operation is graph.calls[2].operation
    assert_same(applied(model, numbers(3, 4)), model(numbers(3, 4)))


def test_a_branch_ends_before_the_next_begins() -> None:
    entry = keras.Input((4,), name="entry")
    branches = []
    for branch in "ab":
        tensor = entry
        for depth in range(3):
            tensor = layers.Dense(4, name=f"{branch}{depth}")(tensor)
        branches.append(tensor)
    model = keras.Model(entry, layers.Add(name="add")(branches))
    assert names(trace(model)) == ["a0", "a1", "a2", "b0", "b1", "b2", "add"]


def test_unused_operations_are_dropped_and_unused_layers_stay() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        ops.sum(model.unused(inputs))
        return model.head(inputs)

    unused = layers.Dense(2, activity_regularizer="l2", name="unused")
    model = Own(call, unused=unused, head=layers.Dense(2, name="head"))
    assert names(trace(model, spec(4))) == ["unused", "head"]


def test_a_model_may_be_deeper_than_the_python_stack() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        for _ in range(1100):
            inputs = inputs + 1.0
        return inputs

    assert len(trace(Own(call), spec(2)).calls) == 1100


def test_tracing_does_not_change_the_model() -> None:
    layer = layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), layer])
    before = len(layer._inbound_nodes)
    call = keras.Layer.__call__
    reference = weakref.ref(trace(model))
    gc.collect()
    assert len(layer._inbound_nodes) == before
    assert keras.Layer.__call__ is call
    assert reference() is None


def test_unknown_dimensions_are_those_of_the_data() -> None:
    model = keras.Sequential([keras.Input((None, 3), batch_size=8), layers.Dense(5)])
    assert trace(model).outputs.shape == (None, None, 5)
    assert trace(model, numbers(2, 7, 3)).outputs.shape == (None, 7, 5)


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def two_inputs(**options: Any) -> keras.Model:
    entries = {"left": keras.Input((4,), name="left"), "right": keras.Input((1,), name="right", **options)}
    total = layers.Dense(3)(entries["left"]) + layers.Dense(3)(entries["right"])
    return keras.Model(entries, {"total": total, "left": entries["left"], "both": [total * 2.0, total]})


def test_inputs_are_converted_to_the_declared_type_and_rank() -> None:
    model = two_inputs()
    inputs = {"left": np.ones((5, 4), "int64"), "right": np.ones(5)}
    assert [(t.dtype, t.shape.rank) for t in model_graph.standardize(model, inputs)] == [(tf.float32, 2)] * 2
    assert_same(applied(model, inputs), model(inputs))


def test_a_dict_of_inputs_is_matched_by_name() -> None:
    entries = [keras.Input((2,), name="z"), keras.Input((2,), name="a")]
    model = keras.Model(entries, layers.Subtract()(entries))
    inputs = {"a": numbers(3, 2, seed=1), "z": numbers(3, 2, seed=2)}
    assert_same(applied(model, inputs), model(inputs))


class AddIfPresent(layers.Layer):
    def call(self, inputs: Any, other: Any = None) -> Any:
        return inputs if other is None else inputs + other


def test_an_optional_input_may_be_absent() -> None:
    left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right", optional=True)
    model = keras.Model({"left": left, "right": right}, AddIfPresent()(left, other=right))
    for inputs in ({"left": numbers(3, 2), "right": numbers(3, 2)}, {"left": numbers(3, 2), "right": None}):
        assert_same(applied(model, inputs, specs=inputs), model(inputs))


def test_a_nested_model_converts_its_inputs() -> None:
    inner_entry = keras.Input((4,), dtype="float32")
    inner = keras.Model(inner_entry, inner_entry * 2.5, name="inner")
    entry = keras.Input((4,), dtype="int32")
    model = keras.Model(entry, inner(entry))
    assert_same(applied(model, np.arange(8).reshape(2, 4)), model(np.arange(8).reshape(2, 4)))


# --- layers, masks and states -----------------------------------------------------------------------------------------


class Halves(layers.Layer):
    def call(self, inputs: Any) -> dict[str, Any]:
        first, second = ops.split(inputs, 2, axis=-1)
        return {"second": second, "first": first}


def test_layers_may_return_several_tensors_and_have_tensors_as_keyword_arguments() -> None:
    entry = keras.Input((6, 4))
    halves = Halves()(entry)
    attended = layers.MultiHeadAttention(2, 4)(halves["first"], value=halves["second"], key=entry[..., :2])
    sequence, state = layers.GRU(3, return_sequences=True, return_state=True)(attended)
    model = keras.Model(entry, layers.GRU(3)(sequence, initial_state=state))
    assert_same(applied(model, numbers(2, 6, 4)), model(numbers(2, 6, 4)))


def test_tensors_carry_their_masks() -> None:
    words = np.array([[3, 1, 2, 0, 0], [5, 0, 0, 0, 0]])
    entry = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(entry)
    inner = keras.Sequential([keras.Input((5, 4)), layers.LSTM(4, return_sequences=True)], name="inner")
    model = keras.Model(entry, layers.GlobalAveragePooling1D()(layers.Dropout(0.5)(inner(embedded))))
    assert_same(applied(model, words), model(words))


def test_a_mask_argument_reaches_the_layers_of_a_nested_model() -> None:
    entry, mask = keras.Input((5, 4)), keras.Input((5,), dtype="bool")
    inner = keras.Sequential([keras.Input((5, 4)), layers.LSTM(3)], name="inner")
    model = keras.Model([entry, mask], inner(entry, mask=mask))
    inputs = [numbers(2, 5, 4), np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)]
    assert_same(applied(model, inputs), model(inputs))


@pytest.mark.parametrize("training", [True, False])
def test_layers_receive_training(training: bool) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(), keras.Sequential([layers.Dropout(0.5, seed=3)])]
    )
    start = [variable.numpy() for variable in model.variables]
    expected = model(numbers(8, 4), training=training)
    updated = [variable.numpy() for variable in model.variables]
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    assert_same(applied(model, numbers(8, 4), training), expected)
    assert_same([variable.numpy() for variable in model.variables], updated)


def test_a_state_is_updated_in_the_order_of_the_model() -> None:
    # A depth-first order alone would normalize the short branch after the long one.
    entry = keras.Input((4,))
    norm = layers.BatchNormalization(momentum=0.5)
    early = norm(entry * 3.0)
    late = norm(layers.Dense(4)(layers.Dense(4)(entry)))
    model = keras.Model(entry, [late, early])
    start = model.get_weights()
    model(numbers(8, 4), training=True)
    expected = model.get_weights()
    model.set_weights(start)
    applied(model, numbers(8, 4), training=True)
    assert_same(model.get_weights(), expected)


def test_a_layer_that_is_used_twice_adds_its_loss_twice() -> None:
    layer = layers.Dense(4, activity_regularizer=keras.regularizers.L2(1.0))
    entry = keras.Input((4,))
    model = keras.Model(entry, layer(layer(entry)))
    model(numbers(2, 4))
    expected = model.losses
    applied(model, numbers(2, 4))
    assert len(expected) == 2
    assert_same(model.losses, expected)


# --- subclassed models ------------------------------------------------------------------------------------------------


def test_the_calls_of_nested_subclasses_are_traced() -> None:
    def encode(model: Own, inputs: Any, training: Any) -> Any:
        return ops.relu(model.dense(inputs)) + inputs

    def call(model: Own, inputs: Any, training: Any) -> Any:
        return model.head(model.drop(model.encoder(inputs["x"]), training=training))

    encoder = Own(encode, dense=layers.Dense(4, name="dense"), name="encoder")
    model = Own(call, encoder=encoder, drop=layers.Dropout(0.5, name="drop"), head=layers.Dense(2, name="head"))
    inputs = {"x": numbers(3, 4)}
    graph = trace(model, inputs)
    stripped = [re.sub(r"_\d+$", "", name) for name in names(graph)]
    assert stripped == ["encoder/dense", "encoder/relu", "encoder/add", "drop", "head"]
    given = [call.training for call in graph.calls if isinstance(call.operation, keras.Layer)]
    assert given == [(True, False)] * 3
    assert_same(applied(model, inputs, specs=inputs), model(inputs))


def test_a_constant_training_argument_of_a_subclass_stays() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        return model.drop(model.norm(inputs, training=False), training=True)

    norm = layers.BatchNormalization()
    model = Own(call, norm=norm, drop=layers.Dropout(0.5, seed=1))
    graph = trace(model, spec(4))
    assert [call.training for call in graph.calls] == [(False, False), (True, True)]
    applied(model, numbers(8, 4), training=True, specs=spec(4))
    np.testing.assert_array_equal(norm.moving_mean, np.zeros(4))


def test_weights_that_operations_read_are_no_constants() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        places = model.places(ops.arange(5))  # without a symbolic input, and not a constant
        return ops.matmul(model.embed(inputs) + places, ops.transpose(model.embed.embeddings))

    model = Own(call, embed=layers.Embedding(9, 4, name="embed"), places=layers.Embedding(5, 4, name="places"))
    words = np.array([[1, 2, 3, 4, 0]])
    graph = trace(model, words)
    tensors = {graph.inputs[0]: tf.constant(words)}
    with tf.GradientTape() as tape:
        model_graph.run(graph.calls, tensors, True)
        loss = tf.reduce_sum(tf.square(tensors[graph.outputs]))
    found = tape.gradient(loss, [v.value for v in model.trainable_variables])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(words, training=True)))
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-6)
    read = {id(v) for call in graph.calls for v in call.variables}
    assert read == {id(v) for v in model.trainable_variables}


def test_a_nested_model_of_a_constant_is_opened() -> None:
    features = tf.constant(numbers(7, 3))

    def double(model: Own, inputs: Any, training: Any) -> Any:
        return model.drop(2 * inputs)

    def call(model: Own, inputs: Any, training: Any) -> Any:
        rows = model.half(model.twice(features)) + ops.cast(model.whole(features), "float16")
        return ops.take(rows, inputs, axis=0)

    half = keras.Sequential([layers.Dense(4, dtype="mixed_float16", name="half")], name="inner")
    twice = Own(double, name="twice", drop=layers.Dropout(0.5, name="drop"))
    twice.dtype_policy = keras.DTypePolicy("mixed_float16")
    model = Own(call, half=half, twice=twice, whole=keras.Sequential([layers.Dense(4, name="whole")], name="outer"))
    words = np.array([1, 2, 6, 2])
    expected = model(words)
    found = names(trace(model, words))
    assert {"twice/drop", "inner/half", "outer/whole"} < set(found)
    assert any(name.startswith("twice/multiply") for name in found)
    assert_same(applied(model, words, specs=words), expected)


def test_layers_of_a_call_without_training_infer() -> None:
    class Silent(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.5)

        def call(self, inputs: Any) -> Any:
            return self.drop(self.norm(inputs))

    model = Silent()
    expected = model(numbers(8, 4))
    assert_same(applied(model, numbers(8, 4), training=True, specs=spec(4)), expected)
    np.testing.assert_array_equal(model.norm.moving_mean, np.zeros(4))


def test_operations_read_weights_in_the_compute_type_of_their_model() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        return ops.matmul(inputs, model.dense.kernel) + ops.cast(model.dense(inputs), "float16")

    model = Own(call, dense=layers.Dense(4, dtype="float32"))
    model.dense.build((None, 4))
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    inputs = numbers(2, 4)
    expected = model(inputs)
    assert expected.dtype == tf.float16
    assert_same(applied(model, inputs, specs=inputs), expected)


def test_a_loss_that_a_subclass_adds_is_added() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        hidden = model.dense(inputs)
        model.add_loss(ops.mean(ops.square(hidden)))
        return model.head(hidden)

    model = Own(call, dense=layers.Dense(4), head=layers.Dense(2))
    model(numbers(3, 4))
    expected = model.losses
    for _ in range(2):
        applied(model, numbers(3, 4), specs=spec(4))
        assert_same(model.losses, expected)


def test_a_nested_model_that_cannot_be_traced_is_one_layer_call() -> None:
    def opaque(model: Own, inputs: Any, training: Any) -> Any:
        return tf.sort(model.dense(inputs))

    inner = Own(opaque, dense=layers.Dense(4, name="dense"), name="opaque")
    model = Own(lambda model, inputs, training: model.head(model.inner(inputs)), inner=inner, head=layers.Dense(2))
    inputs = numbers(3, 4)
    assert names(trace(model, inputs))[0] == "opaque"
    assert_same(applied(model, inputs, specs=inputs), model(inputs))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model, inputs, training: tf.sort(model.dense(inputs)), "A KerasTensor cannot be used as input"),
        (lambda model, inputs, training: model.dense(inputs) * model.dense.bias.value, "it reads the weight .*bias"),
        (lambda model, inputs, training: model.dense.bias.assign_add([1.0] * 4) + inputs, "it reads the weight .*bias"),
        (lambda model, inputs, training: model.dense.bias.assign([1.0] * 4) + inputs, "it changes the state .*bias"),
        (
            lambda model, inputs, training: (
                model.dense(inputs) + ops.broadcast_to(ops.ones_like(inputs), ops.shape(inputs))
            ),
            "it passes the size of the batch to 'broadcast_to",
        ),
        (lambda model, inputs, training: inputs if ops.sum(inputs) > 0 else -inputs, "symbolic|boolean|bool"),
    ],
    ids=["tensorflow", "reads a weight", "adds to a weight", "changes a weight", "size of the batch", "condition"],
)
def test_the_error_for_a_call_that_cannot_be_traced_names_the_reason(call: Any, reason: str) -> None:
    model = Own(call, dense=layers.Dense(4, name="dense"))
    model.dense.build((None, 4))
    model.built = True
    with pytest.raises(
        ValueError, match=rf"must run on symbolic tensors of any batch size, received Own, where: .*{reason}"
    ) as error:
        trace(model, spec(4))
    assert "use keras.ops in place of tf, move code that needs real tensors into a keras.Layer" in str(error.value)


def test_the_error_for_a_call_that_depends_on_training_names_the_layer() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        hidden = model.dense(inputs)
        return model.noise(hidden) if training else hidden

    model = Own(call, dense=layers.Dense(4), noise=layers.GaussianNoise(1.0, name="noise"))
    with pytest.raises(ValueError, match=r"same operations in training and in inference, received Own.* at 'noise'"):
        trace(model, spec(4))


def test_outputs_that_depend_on_training_are_refused() -> None:
    def call(model: Own, inputs: Any, training: Any) -> Any:
        outputs = [model.one(inputs), model.other(inputs)]
        return outputs if training else outputs[::-1]

    with pytest.raises(ValueError, match="received Own, where they differ in their outputs"):
        trace(Own(call, one=layers.Dense(2), other=layers.Dense(2)), spec(4))


def test_a_model_without_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"received Sequential 'nameless' without any; begin it with keras.Input"):
        trace(keras.Sequential([layers.Dense(2)], name="nameless"))


def test_a_sequential_model_without_inputs_is_built_from_the_data() -> None:
    model = keras.Sequential([layers.Dense(2, name="dense")])
    assert names(trace(model, numbers(2, 4))) == ["dense"]
    assert_same(applied(model, numbers(2, 4)), model(numbers(2, 4)))


def test_a_model_with_its_own_mask_or_regularizer_is_refused() -> None:
    model = Own(lambda model, inputs, training: inputs)
    model.activity_regularizer = keras.regularizers.L2()
    with pytest.raises(ValueError, match=r"must end with its outputs, received Own .* move it into a last layer"):
        trace(model, spec(4))

"""Blocks of layers, of users and of KerasHub, are sharded inside, and train as on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.strategies.test_tensor_parallel import assert_equal, shard_sizes, trained
from tfpar._compat.variables import sharded_memory

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TOKENS, LENGTH, WIDTH, CLASSES = 40, 6, 8, 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


class TransformerBlock(layers.Layer):
    """The block of Keras' example of text classification."""

    def __init__(self, width: int = WIDTH, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, width)
        self.feedforward = keras.Sequential([layers.Dense(32, "relu", name="up"), layers.Dense(width, name="down")])
        self.normalizations = [layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)]
        self.dropouts = [layers.Dropout(0.1, seed=1), layers.Dropout(0.1, seed=2)]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        attended = self.dropouts[0](self.attention(inputs, inputs), training=training)
        hidden = self.normalizations[0](inputs + attended)
        output = self.dropouts[1](self.feedforward(hidden), training=training)
        return self.normalizations[1](hidden + output)


class TokensAndPositions(layers.Layer):
    """Embeddings of both; the mask of its output is that of the tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(TOKENS, WIDTH, mask_zero=True, name="tokens")
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return self.tokens.compute_mask(inputs, mask)

    def call(self, inputs: Any) -> Any:
        return self.tokens(inputs) + self.positions(ops.arange(ops.shape(inputs)[-1]))


class CausalBlock(layers.Layer):
    """Attention by hand, of which each size depends on the batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.heads_layer, self.joined_layer = layers.Dense(3 * WIDTH, name="heads"), layers.Dense(WIDTH, name="joined")

    def heads(self, hidden: Any) -> Any:
        size, length = ops.shape(hidden)[0], ops.shape(hidden)[1]
        return ops.transpose(ops.reshape(hidden, (size, length, 2, WIDTH // 2)), (0, 2, 1, 3))

    def call(self, inputs: Any) -> Any:
        size, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
        query, key, value = map(self.heads, ops.split(self.heads_layer(inputs), 3, axis=-1))
        positions = ops.arange(length)
        mask = ops.reshape(positions[:, None] >= positions[None], (1, 1, length, length))
        mask = ops.broadcast_to(mask, (size, 1, length, length))
        scores = ops.where(mask, query @ ops.transpose(key, (0, 1, 3, 2)), -1e9)
        hidden = ops.transpose(ops.softmax(scores) @ value, (0, 2, 1, 3))
        return inputs + self.joined_layer(ops.reshape(hidden, (size, length, WIDTH)))


class Nested(layers.Layer):
    """Blocks inside of a block, a weight of its own, and a loss."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [TransformerBlock(), CausalBlock()]
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        hidden = inputs * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        self.add_loss(0.01 * ops.mean(ops.square(hidden)))
        return hidden


class OnlyInTraining(layers.Layer):
    """A block that stays whole, since it has other operations in training."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = layers.Dense(WIDTH, "tanh")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.hidden(inputs) if not training else self.hidden(inputs) * 0.5


def compiled(inputs: Any, hidden: Any, optimizer: Any = None) -> keras.Model:
    model = keras.Model(inputs, layers.Dense(CLASSES, name="classes")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def by_hand(num_tokens: int = TOKENS, width: int = WIDTH) -> keras.Model:
    """The model of Keras' example."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = TransformerBlock(width, name="block")(layers.Embedding(num_tokens, width)(tokens))
    return compiled(tokens, layers.GlobalAveragePooling1D()(hidden), keras.optimizers.Adam(0.01, global_clipnorm=0.1))


def nested() -> keras.Model:
    """Blocks in blocks after a masked table, for sequences of any length, whose mask reaches the pooling."""
    tokens = keras.Input((None,), dtype="int32")
    hidden = Nested()(TokensAndPositions(name="table")(tokens))
    hidden = CausalBlock(name="causal")(TokensAndPositions(name="second")(tokens) + hidden)
    return compiled(tokens, OnlyInTraining()(layers.GlobalAveragePooling1D()(hidden)), keras.optimizers.SGD(0.1))


def masked() -> keras.Model:
    """Blocks that hand the mask of a table on to the loss of each position."""
    tokens = keras.Input((None,), dtype="int32")
    hidden = CausalBlock(name="causal")(TokensAndPositions(name="table")(tokens))
    return compiled(tokens, layers.Activation("tanh")(hidden))


def bert(num_tokens: int = TOKENS, num_blocks: int = 2, width: int = WIDTH) -> keras.Model:
    """A BERT of KerasHub with a head."""
    from keras_hub import models

    backbone = models.BertBackbone(num_tokens, num_blocks, 2, width, 3 * width, max_sequence_length=LENGTH)
    return compiled(backbone.input, backbone.output["pooled_output"])


def translator(num_tokens: int = TOKENS, width: int = WIDTH) -> keras.Model:
    """An encoder and a decoder of KerasHub."""
    from keras_hub import layers as hub

    tokens = keras.Input((None,), dtype="int32")
    embedded = hub.TokenAndPositionEmbedding(num_tokens, LENGTH, width, mask_zero=True)(tokens)
    encoded = hub.TransformerEncoder(3 * width, 2, dropout=0.1)(embedded)
    hidden = hub.TransformerDecoder(3 * width, 2, dropout=0.1, normalize_first=True)(embedded, encoded)
    return compiled(tokens, layers.GlobalAveragePooling1D()(hidden))


def recurrent() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    return compiled(tokens, layers.LSTM(128)(layers.Embedding(1000, 128)(tokens)))


def of_tokens(length: int = LENGTH) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.integers(0, TOKENS, (21, length)), random.integers(0, CLASSES, 21)


def of_positions() -> tuple[Any, Any]:
    tokens, _ = of_tokens()
    return tokens, tokens % CLASSES


def of_bert() -> tuple[Any, Any]:
    tokens, targets = of_tokens()
    inputs = {"token_ids": tokens, "segment_ids": tokens % 2, "padding_mask": (tokens % 5 > 0).astype("int32")}
    return inputs, targets


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], set[str]]] = {
    "by hand": (by_hand, of_tokens, {"query/kernel", "attention_output/kernel", "up/kernel", "down/kernel"}),
    "nested": (nested, of_tokens, {"query/kernel", "down/kernel", "heads/kernel", "tokens/embeddings"}),
    "masked": (masked, of_positions, {"heads/kernel", "joined/kernel", "tokens/embeddings"}),
    "BERT": (
        bert, of_bert,
        {"token_embedding/embeddings", "query/kernel", "feedforward_intermediate_dense/kernel", "pooled_dense/kernel"},
    ),
    "translator": (
        translator, of_tokens, {"query/kernel", "feedforward_output_dense/kernel"}
    ),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    if case in ("BERT", "translator"):
        pytest.importorskip("keras_hub")
    build, data, expected = CASES[case]
    _, *wanted = trained(build, data(), tfpar.SingleDevice())
    trainer, *found = trained(build, data(), tfpar.TensorParallel(2))
    assert_equal(found, wanted)
    assert set(shard_sizes(trainer.model)) >= expected


@pytest.mark.extended
def test_replicas_of_shards_equal_one_device() -> None:
    _, *wanted = trained(masked, of_positions(), tfpar.SingleDevice())
    _, *found = trained(masked, of_positions(), tfpar.Hybrid(tfpar.TensorParallel(2), num_replicas=2))
    assert_equal(found, wanted)


class LastScores(layers.Layer):
    """A layer with many weights that TensorParallel does not know."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loop = layers.SimpleRNN(WIDTH, return_sequences=True)

    def call(self, inputs: Any) -> Any:
        return self.loop(inputs)


@pytest.mark.extended
def test_many_small_layers_that_stay_whole_are_named_by_their_sum() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((LENGTH, WIDTH))
        hidden = layers.Dense(WIDTH)(layers.Dense(6 * WIDTH, "relu")(inputs))
        for _ in range(8):
            hidden = LastScores()(hidden)
        return compiled(inputs, hidden[:, 0])

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        trainer = tfpar.Trainer(build, tfpar.TensorParallel(2), seed=0)
        examples = np.ones((4, LENGTH, WIDTH)), np.zeros(4)
        for _ in range(2):
            trainer.fit(*examples, verbose=0)
        preview = str(trainer.preview(tf.data.Dataset.from_tensor_slices(examples).batch(4)))
    line = "57 % of the bytes of the weights of '{}' stay whole: 8 of the class SimpleRNN such as 'last_scores"
    line = line.format(trainer.model.name)
    (message,) = [str(one.message) for one in noted if "stay whole" in str(one.message)]
    assert message.startswith(line)
    assert line in preview


MEASURED = {
    "A BERT of KerasHub: 4 blocks of width 128, 1,000 tokens": lambda: bert(1000, 4, 128),
    "An encoder and a decoder of KerasHub of width 128, 1,000 tokens": lambda: translator(1000, 128),
    "The block of Keras' example of text classification, 20,000 tokens": lambda: by_hand(20_000, 32),
    "An embedding of 1,000 tokens and an LSTM of width 128": recurrent,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MEASURED)
def test_the_guide_states_the_share_of_the_first_device(model: str) -> None:
    pytest.importorskip("keras_hub")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "tensor_parallel.md").read_text(encoding="utf-8")
    weights = tfpar.Trainer(MEASURED[model], tfpar.TensorParallel(2), seed=0).model.weights
    first = sum(int(np.prod(sharded_memory.shards_of(weight)[0].shape)) for weight in weights)
    share = 100 * first / sum(int(np.prod(weight.shape)) for weight in weights)
    assert f"| {model} | {share:.0f} % |" in guide

"""What divides by the batch is refused although the first examples hide it, as in data that are sorted by length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.reduction.test_part_trials import BOTH, assert_refused_before_the_first_step

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LENGTH, WORDS, NUM_EXAMPLES = 6, 9, 24
random = np.random.default_rng(0)
LENGTHS = np.minimum(LENGTH, 1 + np.arange(NUM_EXAMPLES)[::-1] // 2)  # the first twelve are full
TOKENS = np.where(np.arange(LENGTH) < LENGTHS[:, None], random.integers(1, WORDS, (NUM_EXAMPLES, LENGTH)), 0)
CLASSES = random.integers(0, 3, NUM_EXAMPLES)


class MaskedMean(layers.Layer):
    """Adds the loss of the next word, without padding."""

    def call(self, scores: Any, tokens: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(tokens, scores, from_logits=True)
        mask = ops.cast(tokens != 0, losses.dtype)
        self.add_loss(ops.sum(losses * mask) / ops.sum(mask))
        return scores


class OverLongest(layers.Layer):
    """Divides by the longest length of the batch."""

    def call(self, hidden: Any, tokens: Any) -> Any:
        mask = ops.cast(tokens != 0, hidden.dtype)
        return ops.sum(hidden * mask[..., None], 1) / ops.max(ops.sum(mask, -1))


def with_added_loss() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dense(5)(layers.Embedding(WORDS, 4)(tokens))
    model = keras.Model(tokens, MaskedMean()(layers.Dense(WORDS)(hidden), tokens))
    model.compile("sgd")
    return model


def with_longest() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Dense(5, name="hidden")(layers.Embedding(WORDS, 4)(tokens))
    model = keras.Model(tokens, layers.Dense(3)(OverLongest(name="over_longest")(hidden, tokens)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


CASES: dict[str, tuple[Callable[[], keras.Model], tuple[Any, ...], str]] = {
    "added loss": (with_added_loss, (TOKENS,), r"A loss added with add_loss to .* must be a sum or a mean"),
    "layer": (with_longest, (TOKENS, CLASSES), r"must compute each example alone, .*'over_longest'"),
}


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_what_padding_divides_is_refused_although_the_first_examples_have_none(case: str, strategy: Any) -> None:
    assert_refused_before_the_first_step(*CASES[case], strategy)

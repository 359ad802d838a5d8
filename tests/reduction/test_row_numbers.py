"""The kinds of sparse gradient rows by the operations between a batch and the row numbers, read from traced graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfpar.reduction.gradients.indexed_slices import kinds_of
from tfpar.reduction.gradients.row_numbers import Sources, of_all_replicas, of_each_replica

ROWS = 20
LENGTHS = tf.RaggedTensorSpec([None, None], tf.int32)
TOKENS = tf.TensorSpec([None, None], tf.int32)


def kinds(row_numbers: Callable[[Any], Any], given: Any = TOKENS, jit_compile: bool = False) -> list[str | None]:
    """Return the kinds of the rows of a table that are looked up for a batch."""
    table, found = tf.Variable(tf.ones([ROWS, 2])), []

    @tf.function(autograph=False, jit_compile=jit_compile)
    def forward(batch: Any) -> Any:
        return tf.reduce_sum(tf.gather(table, row_numbers(batch)))

    def traced(batch: Any) -> None:
        with tf.GradientTape() as tape:
            total = forward(batch) if jit_compile else forward.python_function(batch)
        found.extend(kinds_of(tape.gradient(total, table), Sources()))

    tf.function(traced, autograph=False).get_concrete_function(given)
    return found


def places(tokens: Any) -> Any:
    return tf.range(tf.shape(tokens)[1])


def words() -> Any:
    entries = tf.lookup.KeyValueTensorInitializer(list(range(5)), list(range(5)), tf.int32, tf.int32)
    return tf.lookup.StaticHashTable(entries, 0)


LISTED: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda tokens: tokens,
    "arithmetic": lambda tokens: (tokens * 7 + 1) % ROWS,
    "floats": lambda tokens: ops.cast(ops.cast(tokens, "float32") / 2, "int32"),
    "n-grams": lambda tokens: tokens[:, :-1] + tokens[:, 1:],
    "offsets of fields": lambda tokens: tokens + tf.constant([[0, 5, 10]]),
    "a mask": lambda tokens: tf.where(tokens > 10, 0, tokens),
    "one token": lambda tokens: tokens[:, 0],
    "a sequence from behind": lambda tokens: tf.reverse(tokens, [1]),
    "unstacked": lambda tokens: tf.unstack(tf.ensure_shape(tokens, [None, 3]), axis=1)[1],
    "split": lambda tokens: tf.split(tokens, 2, axis=1)[1],
    "time first": lambda tokens: tf.transpose(tokens),
    "sorted in each example": lambda tokens: tf.sort(tokens, axis=-1)[:, :2],
    "the most frequent": lambda tokens: tf.argmax(tf.math.bincount(tokens, minlength=9, maxlength=9, axis=-1), -1),
    "a network": lambda tokens: tf.argmax(tf.matmul(tf.one_hot(tokens[:, 0], 3), tf.ones([3, 4])), -1),
    "a word before all": lambda tokens: tf.concat([tf.fill([tf.shape(tokens)[0], 1], 3), tokens], 1),
    "kept by a mask": lambda tokens: tf.boolean_mask(tokens, tokens > 3),
    "chosen in each example": lambda tokens: tf.gather(tokens, tf.argmax(tokens, 1), axis=1, batch_dims=1),
    "a table of words": lambda tokens: words().lookup(tokens),
    "a constant table": lambda tokens: tf.gather(tf.range(ROWS), tokens),
    "hashes": lambda tokens: tf.strings.to_hash_bucket_fast(tf.strings.as_string(tokens), ROWS),
    "distinct numbers at their places": lambda tokens: tf.gather(*tf.unique(tf.reshape(tokens, [-1]))),
    "random": lambda tokens: tf.random.uniform([5], 0, ROWS, tf.int32),
    "random in Keras": lambda tokens: keras.random.randint([5], 0, ROWS, seed=3),
    "places in each example": lambda tokens: tf.cumsum(tf.ones_like(tokens), 1),
    "places under a mask": lambda tokens: tf.cumsum(tf.cast(tokens > 0, tf.int32), 1) * tf.cast(tokens > 0, tf.int32),
    "places broadcast": lambda tokens: tf.broadcast_to(places(tokens), tf.shape(tokens)),
    "places tiled": lambda tokens: ops.tile(places(tokens)[None], [ops.shape(tokens)[0], 1]),
    "places added to zeros": lambda tokens: tf.zeros(tf.shape(tokens), tf.int32) + places(tokens),
    "a branch": lambda tokens: tf.cond(tf.shape(tokens)[1] > 2, lambda: tokens, lambda: tokens + 1),
    "own rows of the whole batch": lambda tokens: of_each_replica(tf.gather(of_all_replicas(tokens), [0, 1])),
}
SHARED: dict[str, Callable[[Any], Any]] = {
    "places": places,
    "places of Keras": lambda tokens: ops.arange(ops.shape(tokens)[1]),
    "places by the last axis": lambda tokens: tf.range(tf.shape(tokens)[-1]),
    "places of the embedded": lambda tokens: tf.range(tf.shape(tf.one_hot(tokens, 4))[1]),
    "offset and halved": lambda tokens: (places(tokens) + 2) // 2,
    "distances": lambda tokens: tf.clip_by_value(places(tokens)[:, None] - places(tokens), -4, 4) + 4,
    "counted": lambda tokens: tf.cumsum(tf.ones([tf.shape(tokens)[1]], tf.int32)),
    "up to the largest": lambda tokens: tf.range(tf.reduce_max(tokens) + 1),
    "each number once": lambda tokens: tf.unique(tf.reshape(tokens, [-1]))[0],
}
EQUAL: dict[str, Callable[[Any], Any]] = {
    "constants": lambda tokens: [2, 5, 2],
    "a known size": lambda tokens: tf.range(4),
    "an array": lambda tokens: np.arange(3),
    "constant words": lambda tokens: words().lookup(tf.constant([1, 2])),
    "the whole batch": lambda tokens: of_all_replicas(tokens) // 2,
}
UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "a maximum": lambda tokens: tf.reduce_max(tokens, 0),
    "the last place": lambda tokens: tf.shape(tokens)[1] - 1,
    "the number of examples": lambda tokens: tf.range(tf.shape(tokens)[0]),
    "a sum over examples": lambda tokens: tf.reduce_sum(tokens, 0),
    "less the smallest": lambda tokens: tokens - tf.reduce_min(tokens),
    "a running sum over examples": lambda tokens: tf.cumsum(tokens, 0),
    "every other": lambda tokens: tf.reshape(tokens, [-1])[::2],
    "all sorted": lambda tokens: tf.sort(tf.reshape(tokens, [-1])),
    "the first example": lambda tokens: tokens[0],
    "some examples": lambda tokens: tf.gather(tokens, [0, 0]),
    "distinct numbers modulo": lambda tokens: tf.unique(tf.reshape(tokens, [-1]))[0] % 3,
    "examples and a constant": lambda tokens: tf.concat([tf.reshape(tokens, [-1]), [3]], 0) // 2,
}
TABLE = [
    (kind, name, rows)
    for kind, of_kind in (("concat", LISTED), ("merge", SHARED), ("sum", EQUAL), (None, UNKNOWN))
    for name, rows in of_kind.items()
]


@pytest.mark.parametrize(
    ("kind", "rows"), [(kind, rows) for kind, _, rows in TABLE], ids=[name for _, name, _ in TABLE]
)
def test_the_kind_follows_from_the_operations(kind: str | None, rows: Callable[[Any], Any]) -> None:
    assert kinds(rows) == [kind]


def test_row_numbers_in_a_variable_are_shared() -> None:
    numbers = tf.Variable([1, 2])
    assert kinds(lambda tokens: tf.convert_to_tensor(numbers)) == ["merge"]


def test_joined_row_numbers_keep_their_kinds() -> None:
    assert kinds(lambda tokens: tf.concat([tf.reshape(tokens, [-1]), [3]], 0)) == ["concat", "sum"]


RAGGED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "values": ("concat", lambda tokens: tokens.flat_values),
    "padded": ("concat", lambda tokens: tokens.to_tensor()),
    "places of the longest": ("merge", lambda tokens: places(tokens.to_tensor())),
    "places up to the largest length": ("merge", lambda tokens: tf.range(tf.reduce_max(tokens.row_lengths()))),
    "places of each": ("concat", lambda tokens: tf.ragged.range(tokens.row_lengths()).flat_values),
}


@pytest.mark.parametrize("name", RAGGED)
def test_the_kind_of_rows_of_ragged_examples(name: str) -> None:
    kind, rows = RAGGED[name]
    assert kinds(rows, LENGTHS) == [kind]


@pytest.mark.parametrize(
    ("kind", "rows"), [("concat", lambda tokens: tokens // 2), ("merge", places)], ids=["concat", "merge"]
)
def test_the_kind_is_that_of_a_function_that_xla_compiles(kind: str, rows: Callable[[Any], Any]) -> None:
    assert kinds(rows, jit_compile=True) == [kind]

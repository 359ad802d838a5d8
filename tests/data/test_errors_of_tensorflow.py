"""TensorFlow's errors about data in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tfpar import config, data


def raising(error: Exception) -> Callable[[tf.Tensor], tf.Tensor]:
    def function(rows: tf.Tensor) -> tf.Tensor:
        raise error

    return function


@pytest.mark.parametrize("wrapper", [tf.py_function, tf.numpy_function])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("my own error"), "KeyError: 'my own error'"),
        (ValueError("row 3 is bad"), "row 3 is bad"),
        (RuntimeError(), "RuntimeError"),
        (StopIteration("too early"), "StopIteration: too early"),
    ],
    ids=repr,
)
def test_an_error_in_a_function_of_batches_is_its_own_sentence(
    wrapper: Callable[..., tf.Tensor], error: Exception, sentence: str
) -> None:
    function = raising(error)
    dataset = tf.data.Dataset.range(4).batch(2).map(lambda rows: wrapper(function, [rows], tf.int64))
    with pytest.raises(tf.errors.OpError) as raised:
        next(iter(dataset))
    assert data.user_message(raised.value, config.Data()) == sentence
    assert data.cause_of(raised.value) == sentence


def test_a_cache_that_two_processes_write_names_the_way_out(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.range(4).cache(str(tmp_path / "cache"))
    first = iter(dataset)
    next(first)
    with pytest.raises(tf.errors.AlreadyExistsError) as raised:
        next(iter(dataset))
    sentence = data.cause_of(raised.value)
    assert sentence.startswith(f"Another process writes the cache '{tmp_path}/cache")
    assert "Give each worker a file of its own, such as dataset.cache(f'cache-{strategy.rank}')" in sentence

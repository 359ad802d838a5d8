"""TensorFlow's errors about data in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from tfpar import data


def test_a_cache_that_two_processes_write_names_the_way_out(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.range(4).cache(str(tmp_path / "cache"))
    first = iter(dataset)
    next(first)
    with pytest.raises(tf.errors.AlreadyExistsError) as raised:
        next(iter(dataset))
    sentence = data.cause_of(raised.value)
    assert sentence.startswith(f"Another process writes the cache '{tmp_path}/cache")
    assert "Give each worker a file of its own, such as dataset.cache(f'cache-{strategy.rank}')" in sentence

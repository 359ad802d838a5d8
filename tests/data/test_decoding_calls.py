"""Single examples are decoded on all cores of a worker, more than the 16 calls of AUTOTUNE without autotuning."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfpar import config
from tfpar.data import input_pipeline, load
from tfpar.data.sources import split


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("shard_by", ["batch", "example"])
def test_examples_are_decoded_on_all_cores(
    folder: config.Data, monkeypatch: pytest.MonkeyPatch, cache: bool, shard_by: str
) -> None:
    for module in (input_pipeline, split):
        monkeypatch.setattr(module, "num_allowed_cores", lambda: 48)
    calls: list[Any] = []
    original = tf.data.Dataset.map

    def noted(dataset: tf.data.Dataset, function: Any, num_parallel_calls: Any = None, **more: Any) -> Any:
        calls.append(num_parallel_calls)
        return original(dataset, function, num_parallel_calls, **more)

    monkeypatch.setattr(tf.data.Dataset, "map", noted)
    settings = folder.model_copy(update={"cache": cache, "shard_by": shard_by})
    train = load(settings, global_batch_size=8, seed=0).train
    whole = train.global_batches() if shard_by == "example" else train
    assert 48 in calls
    assert sum(len(inputs) for inputs, _ in whole) == 40

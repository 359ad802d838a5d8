"""Pipelines on GPUs are cut for the free memory of the GPUs, which is made up here."""

from __future__ import annotations

import warnings

import keras
import pytest
from keras import layers

import tfpar
from tests.support import parity_cases
from tfpar import cluster

pytestmark = pytest.mark.usefixtures("logical_cpus")


def wide_middle() -> keras.Model:
    """By the number of parameters the last layer is alone; the first device then holds most of the memory."""
    inside = [layers.Dense(4), layers.RepeatVector(50), layers.GlobalAveragePooling1D(), layers.Dense(64)]
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *inside, layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def cut(free_bytes: int | None, monkeypatch: pytest.MonkeyPatch, **settings: int) -> tuple[list[int], int]:
    """The layer calls of each stage with so much free memory on the GPUs, and the largest need of a device."""
    monkeypatch.setattr(cluster, "free_bytes", lambda devices: free_bytes)
    strategy = tfpar.Pipeline(2, 2, balance="parameters", **settings)
    trainer = tfpar.Trainer(wide_middle, strategy, seed=0)
    trainer.build(parity_cases.batches(8, 8))
    planner = strategy.engine._planner
    partition, memory = planner.partition_of(trainer.model), planner.memory_of(trainer.model)
    return [len(stage.calls) for stage in partition.stages], max(partition.device_bytes(memory, 2))


def test_stages_are_cut_for_the_free_memory_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unlimited, needed = cut(None, monkeypatch)
        assert unlimited == [4, 1]
        assert cut(needed, monkeypatch)[0] == unlimited
        assert cut(needed - 1, monkeypatch)[0] == [3, 2]


def test_too_little_memory_is_a_warning_with_both_figures_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        r"The stages of 'sequential.*' need up to 0\.01\d+ MB on one device, by estimate, and the GPU with the least "
        r"free memory has 0\.001 MB: training may run out of memory\. Use balance='memory'"
    )
    with pytest.warns(UserWarning, match=message) as noted:
        assert cut(1000, monkeypatch)[0] == [4, 1]
    assert len(noted) == 1


def test_a_limit_of_the_user_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="memory_limit_bytes=1,000"):
        cut(10**9, monkeypatch, memory_limit_bytes=1000)

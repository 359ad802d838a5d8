"""Optimizers whose updates depend on all weights: with sharded state in one process as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tfpar
from tests.support import shard_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LAYOUTS: dict[str, Callable[[], tfpar.Strategy]] = {
    "sharded state": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="optimizer"),
    "sharded weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "replicas of stages": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2, shard="optimizer"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", shard_cases.OF_ALL_WEIGHTS)
def test_an_optimizer_that_takes_all_weights_at_once_equals_one_device(optimizer: str, layout: str) -> None:
    build = shard_cases.classifier(shard_cases.OF_ALL_WEIGHTS[optimizer])
    small.assert_trains_as_one_device(build, small.data, LAYOUTS[layout])

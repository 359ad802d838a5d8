"""Recomputed layers on two workers."""

from __future__ import annotations

import keras
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.recomputation.test_recompute import data, dense, model_of
from tests.support import small, workers

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


def assert_recomputes_as_one_device() -> None:
    strategy = tfpar.MultiWorker(["CPU:0"], recompute=["block_*", keras.layers.Dense])
    assert ", recomputing; this is worker" in strategy.describe()
    small.assert_trains_as_one_device(model_of(dense), data, lambda: strategy, 1e-9)


def test_recomputed_layers_of_workers_equal_one_device(job: workers.Job) -> None:
    with computing_in("float64"):
        job.run(assert_recomputes_as_one_device)

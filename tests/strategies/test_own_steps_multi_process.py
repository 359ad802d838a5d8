"""Own steps over two workers: the weights and logs of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import small, workers
from tests.support.own_step_cases import CASES
from tests.trainer.test_own_steps import assert_close, of_keras, trained
from tfpar._compat.random_numbers import fixed_random_ops

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def typical_numbers() -> Iterator[None]:
    with computing_in("float64"), fixed_random_ops.all_fixed(lambda name: None):
        yield


def train(name: str, shard: Any) -> Any:
    trainer = tfpar.Trainer(CASES[name].build, tfpar.MultiWorker(["CPU:0"], shard=shard), seed=0)
    with fixed_random_ops.all_fixed(lambda layer: None):
        return trained(CASES[name], trainer.fit, trainer.model)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param("guide", None, marks=pytest.mark.extended),
        pytest.param("VAE", None, marks=pytest.mark.extended),
        ("WGAN-GP", None),
        ("SimCLR", None),
        pytest.param("masked sequences", "optimizer", marks=pytest.mark.extended),
    ],
)
def test_two_workers_equal_one_device(job: workers.Job, name: str, shard: str | None) -> None:
    call = job.start(train, name, shard)
    expected_history, expected = of_keras(name)
    for history, weights in call.results():
        small.assert_same_history(history, expected_history)
        assert_close(weights, expected)

"""A short sample of the attack on the rendezvous; `python -m tests.attacks network --seconds 600` is a long one."""

import collections

import pytest

from tests.attacks import network
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)
from tfpar.cluster import job_secret

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_strangers_neither_delay_a_job_nor_take_part_in_it(seed: int) -> None:
    assert network.attack(seed, collections.Counter(), missing_seconds=3.0) == []


def test_a_chief_that_takes_every_proof_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_secret, "is_proof", lambda *arguments: True)
    assert any(network.attack(seed, collections.Counter(), missing_seconds=1.0) for seed in (0, 5, 7)), (
        "in these a worker is missing"
    )

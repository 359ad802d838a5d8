"""Random Functional models train on pipelines, and on replicas of them, as under Keras; a sample of the seeds."""

from __future__ import annotations

import pytest

from tests.support import random_graphs

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.mark.extended
@pytest.mark.parametrize("seed", [3, 5, 7])
def test_a_random_graph_equals_one_device(seed: int) -> None:
    assert list(random_graphs.differences_of(seed)) == []

"""Upper bounds of what a train step costs the host of a GPU, without XLA; see `tests.support.step_counts`."""

from __future__ import annotations

import pytest

from tests.support import step_counts

pytestmark = pytest.mark.usefixtures("logical_cpus")

# Operations of the GPU, waits of the host, copies. TensorFlow's gradient of a lookup takes the size of its rows.
BOUNDS = {"transformer": (2090, 1, 7), "resnet20": (423, 0, 2)}


@pytest.mark.parametrize("model", [pytest.param("transformer", marks=pytest.mark.extended), "resnet20"])
def test_a_step_has_at_most_so_many_operations_waits_and_copies(model: str) -> None:
    found = step_counts.counts(model)
    most_kernels, most_waits, most_copies = BOUNDS[model]
    assert len(found.kernels) <= most_kernels
    assert len(found.waits) <= most_waits, "\n".join(map(str, found.waits))
    assert len(found.copies) <= most_copies

"""A run resumes with the data of its checkpoint: other data are refused within an epoch, and taken where one begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tfpar
from tests.checkpoint.test_checkpoint import InterruptAt
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")

EXAMPLES = 64


def fit(strategy: str, folder: Path, batch_size: int, interrupt_at: int | None = None, **settings: Any) -> int:
    """Train on 64 examples, and return the steps of the run in all."""
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy](), seed=0)
    trainer.fit(
        parity_cases.inputs(EXAMPLES), parity_cases.labels(EXAMPLES), batch_size=batch_size, verbose=0,
        callbacks=[InterruptAt(trainer, interrupt_at)], checkpoints=tfpar.Checkpoints(folder), **settings,
    )  # fmt: skip
    return int(trainer.model.optimizer.iterations.numpy())


@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_another_batch_size_within_an_epoch_is_refused(strategy: str, tmp_path: Path) -> None:
    """Half of the examples would never be trained on: four batches of 16 are all, and four of 8 were read."""
    fit(strategy, tmp_path, 8, interrupt_at=4)
    written, now = "8 steps with batches of 8 examples", "4 steps with batches of 16 examples"
    with pytest.raises(ValueError, match=f"after step 4 of an epoch of {written}, received an epoch of {now}"):
        fit(strategy, tmp_path, 16)
    assert fit(strategy, tmp_path, 8) == 8, "the same data resume"


def test_another_batch_size_is_taken_where_an_epoch_begins(tmp_path: Path) -> None:
    assert fit("single_device", tmp_path, 8, epochs=1) == 8
    assert fit("mirrored", tmp_path, 16, epochs=2) == 8 + 4


def test_another_batch_size_alone_is_a_warning(tmp_path: Path) -> None:
    """Datasets of batches of several sizes may begin with another one each time."""
    fit("single_device", tmp_path, 8, interrupt_at=2, steps_per_epoch=4)
    with pytest.warns(UserWarning, match="after 2 batches of the data. They had 8 examples .* first one has 16 now"):
        fit("single_device", tmp_path, 16, steps_per_epoch=4)

"""A short sample of the attack on checkpoints; `python -m tests.attacks checkpoint --mutations 10000` is a long one."""

import pytest

from tests.attacks import checkpoint
from tests.support.extent import is_whole

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_a_changed_checkpoint_is_restored_exactly_passed_over_or_refused_in_a_sentence() -> None:
    findings, outcomes = checkpoint.attack(mutations=300 if is_whole() else 150, seed=1)
    assert not findings
    assert min(outcomes.values()) > 0, f"the sample has all kinds of outcomes: {outcomes}"
    assert len(outcomes) == 3

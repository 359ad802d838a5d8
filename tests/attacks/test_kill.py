"""A short sample of the kills; `python -m tests.attacks kill --kills 100` is a long one."""

import pytest

from tests.attacks import kill

pytestmark = [pytest.mark.extended, pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


def test_a_job_whose_processes_are_killed_at_random_ends_as_an_undisturbed_one() -> None:
    assert not kill.attack(kills=2, epochs=4, seed=1)

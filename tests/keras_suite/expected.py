"""Keras' tests that cannot pass under tfpar, each kind with what the test then ends with, and why."""

from __future__ import annotations

import fnmatch
import re
from typing import NamedTuple


class Expected(NamedTuple):
    """A kind of test that is not expected to pass.

    Args:
        tests: A pattern of names, such as `trainers/*::test_fit_*`.
        message: A regular expression for the refusal, or for what the test ends with.
        reason: One sentence.
        strategies: Those under which it is expected.
    """

    tests: str
    message: str
    reason: str
    strategies: tuple[str, ...] = ("single_device", "mirrored", "pipeline")


EXPECTED: list[Expected] = []


def reason(strategy: str, test: str, messages: list[str]) -> str | None:
    """Return why a test may end as it does; None where nothing on the list says so.

    Args:
        strategy: Its name.
        test: Its name.
        messages: The refusals, and what the test ended with.
    """
    for expected in EXPECTED:
        is_meant = strategy in expected.strategies and fnmatch.fnmatchcase(test, expected.tests)
        if is_meant and any(re.search(expected.message, message) for message in messages):
            return expected.reason
    return None

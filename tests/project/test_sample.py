"""What a run of the tests takes without `--whole-tables`."""

from __future__ import annotations

import itertools

import pytest

from tests.support import extent
from tests.support.crossed import sample

pytest_plugins = ["pytester"]
TESTS = """
import pytest

@pytest.mark.crossed
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
@pytest.mark.parametrize(("case", "size"), [("Adam", [1]), ("SGD", [1]), ("Lion", [2])])
def test_crossed(strategy, case, size): pass

@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
@pytest.mark.parametrize("case", ["Adam", "SGD"])
def test_not_crossed(strategy, case): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(5))
def test_few(number): pass

@pytest.mark.few(1)
@pytest.mark.crossed
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
@pytest.mark.parametrize("number", range(2))
def test_few_of_crossed(number, strategy): pass

@pytest.mark.extended
def test_extended(): pass
"""


@pytest.mark.parametrize("sizes", [(2, 2), (3, 7), (7, 3), (6, 2, 3), (1, 5), (4,)])
def test_each_value_comes_once_or_as_often_as_it_must(sizes: tuple[int, ...]) -> None:
    rows = [dict(zip("abc", row, strict=False)) for row in itertools.product(*map(range, sizes))]
    taken = sample(rows, rows)
    assert len(taken) == max(sizes)
    for name, size in zip("abc", sizes, strict=False):
        counts = [sum(row[name] == value for row in taken) for value in range(size)]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
    assert taken == sample(rows, rows)


def test_ci_takes_a_sample_of_crossed_tests_and_no_extended_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    pytester.makeconftest(
        "from tests.support import crossed\n"
        "def pytest_collection_modifyitems(items):\n"
        "    left_out = crossed.left_out(items)\n"
        "    items[:] = [item for item in items if item not in left_out]\n"
    )
    ran = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", "-p", "no:randomly")
    names = [line.split("::")[1].split(" ")[0] for line in ran.outlines if "PASSED" in line]
    assert names == [
        "test_crossed[Adam-size0-mirrored]",
        "test_crossed[SGD-size1-pipeline]",
        "test_crossed[Lion-size2-mirrored]",
        *(f"test_not_crossed[{case}-{strategy}]" for case in ("Adam", "SGD") for strategy in ("mirrored", "pipeline")),
        "test_few[0]",
        "test_few[4]",
        "test_few_of_crossed[0-mirrored]",
    ]


def test_the_programs_of_workers_take_as_much_as_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(extent.VARIABLE, raising=False)
    assert extent.sampled(range(4), of_ci=[1, 3]) == (1, 3)
    monkeypatch.setenv(extent.VARIABLE, "1")
    assert extent.sampled(range(4), of_ci=[1, 3]) == (0, 1, 2, 3)
    with pytest.raises(AssertionError, match="is no part of"):
        extent.sampled(range(4), of_ci=[4])

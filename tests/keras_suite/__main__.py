"""Run Keras' own tests with tfpar in place of `fit`, `evaluate` and `predict`.

`python -m tests.keras_suite --strategy mirrored --only trainers callbacks/csv_logger_test.py`

First the tests run as they are; those that pass, and call one of the three verbs, then run under the strategy. Each
must pass there too, or end as `expected.py` lists with a reason; else the command ends with 1. What has a result is
not run again: interrupt and repeat it as you like.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import keras

from tests.keras_suite import expected, processes
from tests.keras_suite.processes import Records

PACKAGES = ("trainers", "callbacks", "models", "optimizers", "layers")
PASSED, LISTED, REFUSED, FAILED = "passed", "listed", "refused, not listed", "failed"


class Results:
    """What became of the tests under one strategy, in a file.

    Args:
        path: The file; created with the first result.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: Records = json.loads(path.read_text()) if path.exists() else {}

    def add(self, records: Records) -> None:
        """Keep results, also on disk."""
        self.records |= records
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.records, indent=1))
        unfinished.replace(self._path)

    def forget(self, tests: Iterable[str]) -> None:
        """Let tests run again."""
        forgotten = set(tests)
        self.records = {name: record for name, record in self.records.items() if name not in forgotten}


def verdict(strategy: str, test: str, record: dict[str, object]) -> tuple[str, str]:
    """Say how a test under a strategy counts, and why.

    Args:
        strategy: Its name.
        test: Its name.
        record: Its result.

    Returns:
        One of the four verdicts, and a sentence.
    """
    if record["outcome"] == "passed":
        return PASSED, ""
    refusals = [str(refusal) for refusal in record["refusals"]]  # type: ignore[attr-defined]
    ended = f"{record['outcome']}: {record['error']}"
    why = expected.reason(strategy, test, [*refusals, ended])
    if why is not None:
        return LISTED, why
    return (REFUSED, refusals[-1]) if refusals else (FAILED, f"{ended} ({record['where']})")


def baseline(files: Sequence[str], results: Results, seconds: float) -> list[str]:
    """Return the tests of files that plain Keras passes and that call one of the three verbs."""
    missing = [file for file in files if file not in results.records]
    for number, group in enumerate(groups := processes.groups(missing, 10)):
        print(f"keras: group {number + 1} of {len(groups)}", file=sys.stderr, flush=True)
        records = processes.run("keras", group, seconds)
        results.add(records | {file: {"outcome": "file", "calls": 0} for file in group})
    return [
        name
        for name, record in results.records.items()
        if name.split("::")[0] in files and record["outcome"] == "passed" and record["calls"]
    ]


def report(strategy: str, tests: Sequence[str], records: Records, verbose: bool) -> bool:
    """Print a table of the verdicts and each test that must not end so; say whether there is none."""
    counts: dict[str, collections.Counter[str]] = {}
    wrong = []
    for test in sorted(tests):
        kind, why = verdict(strategy, test, records[test])
        counts.setdefault(test.split("/")[0], collections.Counter())[kind] += 1
        if kind in (REFUSED, FAILED) or (verbose and kind == LISTED):
            print(f"{kind}: {test}\n    {why}")
        wrong += [test] if kind in (REFUSED, FAILED) else []
    print(f"\n{strategy}, Keras {keras.__version__}")
    for package, of in counts.items():
        print(f"{package:12}" + "".join(f"{of[kind]:5} {kind}" for kind in (PASSED, LISTED, REFUSED, FAILED)))
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("tests.keras_suite", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--strategy", choices=("single_device", "mirrored", "pipeline"), default="single_device")
    parser.add_argument("--only", nargs="+", default=PACKAGES, help="folders or files of keras/src")
    parser.add_argument("--results", type=Path, default=Path("build/keras_suite"), help="where results are kept")
    parser.add_argument("--again", choices=("wrong", "all"), help="what to run again under the strategy")
    parser.add_argument("--seconds", type=float, default=180.0, help="the limit of one test")
    parser.add_argument("--verbose", action="store_true", help="print also what is listed")
    options = parser.parse_args(arguments)
    files = [file for file in processes.test_files(PACKAGES) if file.startswith(tuple(options.only))]
    folder = options.results / keras.__version__
    tests = baseline(files, Results(folder / "keras.json"), options.seconds)
    results = Results(folder / f"{options.strategy}.json")
    if options.again:
        results.forget(
            test
            for test in tests
            if test in results.records
            and (options.again == "all" or verdict(options.strategy, test, results.records[test])[0] != PASSED)
        )
    missing = [test for test in tests if test not in results.records]
    for number, group in enumerate(groups := processes.groups(missing, 60)):
        print(f"{options.strategy}: group {number + 1} of {len(groups)}", file=sys.stderr, flush=True)
        results.add(processes.run(options.strategy, group, options.seconds))
    return 0 if report(options.strategy, tests, results.records, options.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())

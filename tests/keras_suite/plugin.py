"""The pytest plugin that runs Keras' tests under a strategy and writes their outcomes to a file.

A process of its own for each group of tests, started by `tests.keras_suite.processes`. The settings come from the
environment: this plugin is loaded before pytest reads options of plugins.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

import tfpar
from tests.keras_suite import stand_ins

STRATEGY, RECORDS, SECONDS = "KERAS_SUITE_STRATEGY", "KERAS_SUITE_RECORDS", "KERAS_SUITE_SECONDS"
LIBRARY = str(Path(tfpar.__file__).parent)
DEVICES = ["CPU:0", "CPU:1"]
VERBS = ("fit", "evaluate", "predict")

STRATEGIES: dict[str, Callable[[], tfpar.strategies.Strategy]] = {
    "single_device": tfpar.SingleDevice,
    "mirrored": lambda: tfpar.Mirrored(DEVICES),
    "pipeline": lambda: tfpar.Pipeline(num_stages=2, num_microbatches=2, devices=DEVICES, balance="parameters"),
}


class Suite:
    """One strategy for all tests of the process, and what the running test has met so far.

    Args:
        name: Of a strategy; "keras" leaves Keras as it is and counts the calls.
        records: The file that gets one line of JSON at the begin and one at the end of each test.
        seconds: The limit of one test; beyond it the process ends.
    """

    def __init__(self, name: str, records: Path, seconds: float) -> None:
        self._records, self._seconds = records, seconds
        self._calls: list[str] = []
        self._refusals: list[str] = []
        self._trainers: dict[int, tfpar.Trainer] = {}
        self._strategy = None
        if name != "keras":
            tfpar.use_logical_cpus(len(DEVICES))
            self._strategy = STRATEGIES[name]()
        for verb in VERBS:
            setattr(TensorFlowTrainer, verb, self._in_place_of(getattr(TensorFlowTrainer, verb), verb))

    def _in_place_of(self, original: Callable[..., Any], verb: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(model: Any, *arguments: Any, **settings: Any) -> Any:
            self._calls.append(verb)
            if self._strategy is None:
                return original(model, *arguments, **settings)
            try:
                return getattr(self._trainer(model), verb)(*arguments, **settings)
            except Exception as error:
                if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(LIBRARY):
                    self._refusals.append(_text(error))
                raise

        return method

    def _trainer(self, model: Any) -> tfpar.Trainer:
        if id(model) not in self._trainers:
            # A test that enters a scope of TensorFlow's own chooses its strategy itself.
            strategy = tfpar.strategies.strategy_of(model) if tf.distribute.has_strategy() else self._strategy
            self._trainers[id(model)] = tfpar.Trainer(lambda: model, strategy, seed=None)
        return self._trainers[id(model)]

    def _write(self, **record: Any) -> None:
        with self._records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """End the process where a test takes too long, so that the others can run."""
        self._calls, self._refusals, self._trainers = [], [], {}
        self._write(test=item.nodeid, outcome="started")
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Write what became of a test."""
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if report.failed and call.excinfo else None
            self._write(
                test=item.nodeid,
                outcome=report.outcome,
                calls=len(self._calls),
                refusals=list(dict.fromkeys(self._refusals)),
                error="" if error is None else _text(error),
                where="" if error is None else _where(error),
            )
        return report


def _text(error: BaseException) -> str:
    text = " ".join(line for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {re.sub(r' at 0x[0-9a-f]+', '', text)[:600]}"


def _where(error: BaseException) -> str:
    """The last lines of our own code, and of all code, on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(LIBRARY)]
    shown = [*ours[-2:], frames[-1]] if frames else []
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in shown)


def pytest_configure(config: pytest.Config) -> None:
    """Put tfpar in place before any test is collected."""
    faulthandler.enable(sys.__stderr__)
    suite = Suite(os.environ[STRATEGY], Path(os.environ[RECORDS]), float(os.environ[SECONDS]))
    config.pluginmanager.register(suite, "keras suite")
    config.pluginmanager.register(stand_ins.MissingPackages(), "missing packages")
    if os.environ[STRATEGY] != "keras" and any("trainer_test.py" in argument for argument in config.args):
        stand_ins.import_trainer_test_with_models()

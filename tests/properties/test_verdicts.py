"""Does a part of a batch give the whole? Each model trains as on one device, or is refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import once, verdict_layers, verdict_losses, verdict_metrics, verdicts
from tests.support.verdicts import EQUAL, Case, Refused
from tfpar.comparable import TOLERANCES
from tfpar.parity import relative_difference

pytestmark = pytest.mark.usefixtures("logical_cpus")

SUBJECTS = (verdict_losses.FAMILIES, verdict_metrics.FAMILIES, verdict_layers.FAMILIES)
CASES = {
    f"{family}, {name}": case for subject in SUBJECTS for family in subject for name, case in subject[family].items()
}
Results = dict[str, np.ndarray]


def rows() -> Iterator[Any]:
    """Yield each case on each of its engines.

    CI takes the first of a family with another verdict on replicas or in a pipeline, and of a subject on other engines.
    """
    seen: set[Any] = set()
    for number, subject in enumerate(SUBJECTS):
        for family, cases in subject.items():
            for name, case in cases.items():
                for engine, verdict in case.verdicts.items():
                    group = family if engine in ("mirrored", "pipeline") else number
                    kind = group, engine, verdict if isinstance(verdict, str) else "refused"
                    marks = [pytest.mark.extended] if kind in seen else []
                    seen.add(kind)
                    yield pytest.param(f"{family}, {name}", engine, marks=marks, id=f"{family}, {name}-{engine}")


@pytest.mark.few(36)
@pytest.mark.parametrize(("name", "engine"), [*rows()])
def test_verdict(name: str, engine: str) -> None:
    case, verdict = CASES[name], CASES[name].verdicts[engine]
    with computing_in(case.dtype):
        if isinstance(verdict, Refused):
            assert_refused(name, case, engine, verdict)
            return
        trainer = tfpar.Trainer(case.build, verdicts.ENGINES[engine](), seed=0)
        results = {**called(trainer, case, case.calls), **state(trainer.model)}
        if verdict == EQUAL:
            assert_equal(results, reference(name), case.dtype)
        else:
            assert all(np.isfinite(result).all() for result in results.values())


@pytest.mark.parametrize("engine", ["mirrored", "pipeline"])
def test_a_layer_that_draws_predicts_other_numbers_each_time(engine: str) -> None:
    case = verdict_layers.RANDOM["one of two results"]
    trainer = tfpar.Trainer(case.build, verdicts.ENGINES[engine](), seed=0)
    first, second = (trainer.predict(case.data(), verbose=0) for _ in range(2))
    assert np.abs(first - second).mean() > 0.01


def assert_refused(name: str, case: Case, engine: str, verdict: Refused) -> None:
    """Compare the calls before the refused one with one device, and check that it changes no weight."""
    number = case.calls.index(verdict.call)
    before: list[np.ndarray] = []

    def run() -> None:
        trainer = tfpar.Trainer(case.build, verdicts.ENGINES[engine](), seed=0)
        if results := called(trainer, case, case.calls[:number]):
            assert_equal(results, {key: reference(name)[key] for key in results}, case.dtype)
        before.extend(trainer.model.get_weights())
        try:
            called(trainer, case, (verdict.call,))
        finally:
            for old, new in zip(before, trainer.model.get_weights(), strict=False):  # the call may build the model
                np.testing.assert_array_equal(new, old)

    with pytest.raises(verdict.error, match=verdict.message):
        run()


@once.in_a_run
def reference(name: str) -> Results:
    """Keras' own methods, without any strategy; the same for all engines."""
    keras.utils.set_random_seed(0)
    model = CASES[name].build()
    return {**called(model, CASES[name], CASES[name].calls), **state(model)}


def called(model: Any, case: Case, calls: tuple[str, ...]) -> Results:
    """Call methods of a model or a trainer in turn, and return their results by name."""
    results: Results = {}
    for number, call in enumerate(calls):
        data = case.data()
        if call == "evaluate":
            found = model.evaluate(data, verbose=0, return_dict=True)
        elif call == "predict":
            outputs = tf.nest.flatten(model.predict(data, verbose=0), expand_composites=True)
            found = {f"output {key}": value for key, value in enumerate(outputs)}
        else:
            validation = {"validation_data": data} if call == "validated fit" else {}
            found = model.fit(data, epochs=2, verbose=0, **validation).history
        results.update({f"{call} {number}: {key}": np.asarray(value) for key, value in found.items()})
    return results


def state(model: keras.Model) -> Results:
    """Return the weights of a model and of its optimizer, by number: names count the models of a process."""
    variables = [*model.get_weights(), *(slot.numpy() for slot in model.optimizer.variables)]
    return {f"variable {number}": variable for number, variable in enumerate(variables)}


def assert_equal(results: Results, expected: Results, dtype: str) -> None:
    assert results.keys() == expected.keys()
    for key, result in results.items():
        is_number = np.isfinite(expected[key])
        np.testing.assert_array_equal(np.isfinite(result), is_number, key)
        # The gradient of some biases is zero but for rounding, as of those of the keys of attention.
        difference = relative_difference(result[is_number], expected[key][is_number], min_scale=1e-3)
        assert difference <= TOLERANCES[dtype], f"{key} differs by {difference:.2g} from one device"

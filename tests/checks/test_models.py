"""A model of a user runs on every device and under its strategy, and an error in it is reported as the user's."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tfpar
from tests.support import doctor_faults, doctor_models
from tfpar import config
from tfpar.checks import model_tasks, models
from tfpar.checks.devices import on_device
from tfpar.checks.models import ModelSource
from tfpar.checks.processes import Outcome, started
from tfpar.checks.report import Check
from tfpar.cluster import gpus
from tfpar.messages import users_code
from tfpar.parity import Difference, ParityReport

NO_GPUS = gpus.Found(())
with_children = pytest.mark.multi_process
ONE_STEP = {"dtype": None, "start": None}


def source(function: Callable[[], Any], **settings: Any) -> ModelSource:
    return ModelSource(function=f"{doctor_models.__name__}:{function.__name__}", **settings)


@pytest.mark.extended
@with_children
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_a_device_that_computes_a_model_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_faults.inject(monkeypatch, "model CPU:1")
    found = models.check(source(doctor_models.classifier), ["CPU:0", "CPU:1"], NO_GPUS, at_once=2)
    checks = {check.name: check for check in found}
    assert [name for name, check in checks.items() if check.status == "WRONG"] == ["model on CPU:1"]
    assert "the gradient of sequential" in checks["model on CPU:1"].figure
    assert "the CPU in float64" in checks["model on CPU:0"].figure


FAILING = {
    doctor_models.raising: "your code raises KeyError: 'width'",
    doctor_models.raising_layer: "when calling Raising.call(). Could not",
    doctor_models.exiting: "your code raises SystemExit: 2",
}


@pytest.mark.extended
@with_children
def test_a_model_function_that_fails_is_reported_as_the_users() -> None:
    tasks = [on_device("model_tasks.step", "CPU:0", NO_GPUS, source=source(one), **ONE_STEP) for one in FAILING]
    with started(tasks, at_once=2) as futures:
        checks = [models.failed("model", future.result(), is_first=True) for future in futures]
    lines = Path(doctor_models.__file__).read_text().splitlines()
    for check, figure in zip(checks, FAILING.values(), strict=True):
        assert (check.status, figure in check.figure) == ("WRONG", True), check
        assert f"Correct {check.values['place']}" in check.way_out
        assert "the line that the doctor names" in lines[int(check.values["place"].rpartition(":")[2]) - 1]


@pytest.mark.parametrize(
    ("function", "way_out"),
    [
        (doctor_models.not_compiled, r"is not compiled\. Call model\.compile\(optimizer, loss\)"),
        (doctor_models.without_shapes, "name its data, too, with --data"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    function: Callable[[], Any], way_out: str, logical_cpus: list[str]
) -> None:
    with pytest.raises(ValueError, match=way_out):
        model_tasks.step("CPU:0", source(function), **ONE_STEP)


def test_data_of_a_model_function_are_used(logical_cpus: list[str]) -> None:
    given = source(doctor_models.without_shapes, data=f"{doctor_models.__name__}:data")
    result = model_tasks.step("CPU:0", given, **ONE_STEP)
    assert result["start"][1][0].shape == (4, 3)


@pytest.mark.parametrize("name", ["build_model", "nowhere.py:build_model", "tfpar:nothing", "tests.support:"])
def test_a_function_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"function|file"):
        model_tasks.function_of(name)


SCRIPT = """
POLICY = "float32"
import keras, tensorflow as tf, tfpar
tfpar.use_logical_cpus(7)
tf.config.threading.set_intra_op_parallelism_threads(7)
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [])
keras.config.set_dtype_policy(POLICY)
EXECUTIONS = []
def build_model():
    EXECUTIONS.append(None)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
def data():
    assert EXECUTIONS
    return tf.data.Dataset.from_tensors(([[1.0] * 3] * 4, [[1.0]] * 4))
"""


def test_a_script_with_settings_of_devices_and_types_is_examined(tmp_path: Path, logical_cpus: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("float32", "mixed_bfloat16"))
    names = {key: f"{tmp_path / 'script.py'}:{name}" for key, name in (("function", "build_model"), ("data", "data"))}
    check = examined(ModelSource(overrides=("strategy.kind=mirrored",), **names))
    assert check.status == "ok", check.figure


@pytest.mark.parametrize(
    "call",
    [
        "tfpar.doctor()",
        "tfpar.Trainer(build_model, tfpar.SingleDevice()).fit([[1.0]], [[1.0]])",
        "build_model().fit([[1.0]], [[1.0]])",
    ],
    ids=["doctor", "trainer", "keras"],
)
def test_a_script_that_trains_when_it_is_imported_is_refused(call: str, tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(SCRIPT + call)
    with pytest.raises(RuntimeError, match=r'unguarded.py.*under `if __name__ == "__main__":`'):
        model_tasks.function_of(f"{tmp_path / 'unguarded.py'}:build_model")


def test_a_function_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(ValueError, match="Move it to a file"):
        tfpar.doctor(lambda: None, verbose=0)


PIPELINE = ("strategy.kind=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=2")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("function", "overrides", "switched_off", "bound"),
    [
        (doctor_models.augmented, ("strategy.kind=mirrored",), ["turns"], "1e-05 in float32, as the model does not"),
        (doctor_models.random_and_normalized, PIPELINE, ["drops", "samples", "normalizes"], "1e-09 in float64"),
    ],
)
def test_what_differs_by_design_is_no_finding(
    function: Callable[[], Any],
    overrides: tuple[str, ...],
    switched_off: list[str],
    bound: str,
    logical_cpus: list[str],
) -> None:
    check = examined(source(function, overrides=overrides))
    assert check.status == "ok", check.figure
    assert check.values["switched_off"] == switched_off
    assert check.bound.startswith(bound)
    assert f"with {', '.join(switched_off)} switched off" in check.figure


def examined(given: ModelSource) -> Check:
    """The check of a strategy on the logical CPUs 1 and 2, in this process."""
    import keras

    settings = given.run().strategy.model_copy(update={"devices": ("CPU:1", "CPU:2")})
    try:
        return model_tasks.compare(given, settings)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def test_a_strategy_is_compared_on_one_batch_of_a_shuffled_dataset(logical_cpus: list[str]) -> None:
    overrides = (f"trainer={doctor_models.__name__}.Shuffled", "strategy.kind=mirrored")
    check = examined(ModelSource(overrides=overrides))
    assert check.status == "ok", check.figure


NO_NUMBER = float("nan")
REPORT = ParityReport("Mirrored", 3, 1e-9, (Difference("a", 0.0, 1e-12), Difference("b", 0.0, 0.1)), ())


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, "WRONG", "b differs by 1.0e-01"),
        ({"switched_off": ("drops",)}, "WRONG", "after three steps, with drops switched off"),
        ({"weights": (), "logs": (Difference("loss", NO_NUMBER, 0.1),)}, "WRONG", "loss differs by 1.0e-01"),
        ({"weights": (), "logs": (Difference("loss", NO_NUMBER, NO_NUMBER),)}, "WRONG", "loss differs by nan"),
        ({"tolerance": 0.5}, "ok", "differ by 1.0e-01"),
    ],
)
def test_three_steps_of_a_strategy_are_judged(changes: dict[str, Any], status: str, said: str) -> None:
    check = model_tasks.judged(dataclasses.replace(REPORT, **changes))
    assert check.status == status
    assert said in check.figure


GRID = functools.partial(config.Hybrid, num_stages=2, num_microbatches=4, num_replicas=2)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (config.Auto(), 1),
        (config.Mirrored(), 4),
        (config.Mirrored(num_logical_cpus=2), 4),
        (config.Mirrored(devices=("GPU:1", "GPU:3")), 2),
        (config.Pipeline(num_stages=3, num_microbatches=4), 3),
        (config.Hybrid(num_stages=2, num_microbatches=4, num_shards=2, num_replicas=3), 12),
        (GRID(across_workers=True), 4),
    ],
)
def test_logical_cpus_stand_for_the_devices_of_a_strategy(settings: Any, number: int) -> None:
    changed = models.settings_on(settings, ["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    assert (changed.devices, changed.num_logical_cpus) == (None, number)
    assert not getattr(changed, "across_workers", False)
    assert models.settings_on(config.SingleDevice(device="GPU:1"), ["CPU:0"]).device is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("right", "figure"),
    [(["GPU:0"], "it needs devices that compute rightly"), (["GPU:0", "GPU:1"], "its 4 devices are those of several")],
)
def test_a_strategy_that_lacks_devices_is_not_examined(right: list[str], figure: str) -> None:
    settings = ("kind=hybrid", "num_replicas=2", "num_stages=2", "num_microbatches=2", "across_workers=true")
    given = source(doctor_models.on_the_host, overrides=tuple(f"strategy.{setting}" for setting in settings))
    check = models.check_strategy(given, ["GPU:0", "GPU:1"], right)
    assert check.status == "skipped"
    assert figure in check.figure


def operation(kind: str, function: str, line: int = 0) -> dict[str, Any]:
    return {"kind": kind, "function": function, "file": "/models/model.py" if line else "", "line": line}


@pytest.mark.parametrize(
    ("on_host", "said"),
    [
        ([], "all 1,234 operations of a step have kernels for GPUs"),
        (
            [operation(kind, "My.call", line) for kind, line in (("Unique", 41), ("Where", 43), ("Unique", 41))],
            "3 operations of `My.call` (model.py:41, 43) run on the host: Unique, Where (1,234 operations in a",
        ),
        ([operation("Where", "theirs")], "1 operation of `theirs` runs on the host: Where"),
        ([operation("Where", "")], "1 operation of `the step` runs on the host: Where"),
        ([operation("Where", f"layer {number}") for number in range(7)], "on the host: Where; 2 more places"),
    ],
)
def test_operations_on_the_host_are_named_by_function_or_layer(on_host: list[dict[str, Any]], said: str) -> None:
    check = models.without_kernels(1234, on_host)
    assert check.status == ("slow" if on_host else "ok")
    assert said in check.figure


def one_step(loss: float = 1.0, gradient: float = 0.0) -> dict[str, Any]:
    """A step with a weight of large gradients, and one whose gradient is zero but for rounding."""
    gradients = {"kernel": np.array([1.0, 2.0]), "key/bias": np.array([gradient])}
    return {"loss": loss, "gradients": gradients, "policy": "float32"}


@pytest.mark.parametrize(
    ("step", "first"),
    [
        (one_step(gradient=1e-9), ""),
        (one_step(gradient=0.1), "the gradient of key/bias"),
        (one_step(loss=1.01), "the loss"),
        (one_step(loss=float("nan")), "the loss"),
    ],
)
def test_a_step_that_differs_by_more_than_rounding_is_wrong(step: dict[str, Any], first: str) -> None:
    check = models.compared("GPU:0", step, one_step(gradient=1e-18), "the CPU in float64")
    assert (check.status, check.values["first"]) == ("WRONG" if first else "ok", first)


def test_an_error_of_a_device_in_the_users_code_is_not_the_users() -> None:
    outcome = Outcome(None, "ResourceExhaustedError: out of memory", "train.py:7")
    assert "your code raises" in models.failed("model", outcome, is_first=True).figure
    check = models.failed("model on GPU:0", outcome)
    assert check.figure == "ResourceExhaustedError: out of memory (at train.py:7, which runs on the CPU)"


class Outer:
    def method(self) -> None:
        def inner() -> None:
            raise KeyError("the line that is found")

        inner()


def test_the_last_line_of_the_users_own_code_is_found() -> None:
    with pytest.raises(KeyError) as raised:
        Outer().method()
    place = users_code.last_place(traceback.extract_tb(raised.tb))
    assert place is not None
    assert (place.file, place.function) == (__file__, "Outer.method.inner")
    assert "the line that is found" in Path(__file__).read_text().splitlines()[place.line - 1]


@pytest.mark.parametrize("file", [tfpar.__file__, np.__file__, traceback.__file__, mock.__file__, "<stdin>"])
def test_a_line_of_a_library_is_not_the_users(file: str) -> None:
    assert users_code.last_place([traceback.FrameSummary(file, 1, "function")]) is None


@pytest.mark.parametrize("text", [None, "def broken(:\n", "VALUE = 1\n"])
def test_a_line_without_a_known_function_has_no_name(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    if text is not None:
        file.write_text(text)
    assert users_code.last_place([traceback.FrameSummary(str(file), 1, "f")]) == (str(file), 1, "")


def test_the_line_of_a_syntax_error_is_found_in_no_frame(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import keras\ndef build_model(:\n")
    with pytest.raises(SyntaxError) as caught:
        model_tasks.function_of(f"{tmp_path / 'broken.py'}:build_model")
    assert users_code.users_place(caught.value) == f"{tmp_path / 'broken.py'}:2"

"""A model of a user runs on every device, and an error in it is reported as the user's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import tfpar
from tests.support import doctor_faults, doctor_models
from tfpar.checks import model_tasks, models
from tfpar.checks.devices import on_device
from tfpar.checks.models import ModelSource
from tfpar.checks.processes import Outcome, started
from tfpar.cluster.gpu import gpus
from tfpar.messages import users_code

NO_GPUS = gpus.VisibleGpus(())
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
        model_tasks.import_function(name)


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
    try:
        result = model_tasks.step("CPU:1", ModelSource(**names), **ONE_STEP)
    finally:
        keras.config.set_dtype_policy("float32")
    assert result["policy"] == "mixed_bfloat16"


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
        model_tasks.import_function(f"{tmp_path / 'unguarded.py'}:build_model")


def test_a_function_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(ValueError, match="Move it to a file"):
        tfpar.doctor(lambda: None, verbose=0)


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
        model_tasks.import_function(f"{tmp_path / 'broken.py'}:build_model")
    assert users_code.users_place(caught.value) == f"{tmp_path / 'broken.py'}:2"

"""A model of a user runs on every device and under its strategy, and an error in it is reported as the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfpar
from tests.support import doctor_models, faulty_devices
from tfpar import config
from tfpar.checks import child_processes, models, strategy_task
from tfpar.checks.check import Check
from tfpar.checks.model_source import ModelSource, function_of
from tfpar.cluster import gpus

NO_GPUS = gpus.Found(())
with_children = pytest.mark.multi_process
SKIPPED = Check("strategy", "skipped", "not examined here")


def source(function: Callable[[], Any], **settings: Any) -> ModelSource:
    return ModelSource(function=f"{doctor_models.__name__}:{function.__name__}", **settings)


def checked(given: ModelSource, names: list[str]) -> dict[str, Check]:
    return {check.name: check for check in models.check(given, names, NO_GPUS, at_once=2)}


@pytest.mark.extended
@with_children
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_a_model_runs_on_every_device_and_under_its_strategy() -> None:
    settings = ("strategy.kind=mirrored", "strategy.num_logical_cpus=2")
    found = checked(source(doctor_models.on_the_host, overrides=settings), ["CPU:0", "CPU:1"])
    assert {name: check.status for name, check in found.items()} == {
        "model": "ok",
        "model on CPU:0": "ok",
        "model on CPU:1": "ok",
        "strategy": "ok",
        "operations on the host": "slow",
    }
    assert "the CPU in float64" in found["model on CPU:1"].figure
    assert "Mirrored over 2 replicas" in found["strategy"].figure
    check = found["operations on the host"]
    line = doctor_models.line_of("raw_ops.UniqueV2")
    assert f"2 operations of `Unique.call` (doctor_models.py:{line}) run on the host: UniqueV2" in check.figure
    assert [(one["kind"], one["layer"]) for one in check.values["on_host"]] == [("UniqueV2", "users_1")] * 2


def test_the_devices_of_this_machine_stand_for_those_of_other_workers() -> None:
    grid = ("strategy.kind=hybrid", "strategy.num_replicas=2", "strategy.num_stages=2", "strategy.num_microbatches=2")
    given = source(doctor_models.on_the_host, overrides=(*grid, "strategy.across_workers=true"))
    settings = strategy_task.settings_on(given.run().strategy, ["CPU:1", "CPU:2", "CPU:3", "CPU:4"])
    assert isinstance(settings, config.Hybrid)
    assert (settings.devices, settings.across_workers) == (("CPU:1", "CPU:2", "CPU:3", "CPU:4"), False)
    check = models._strategy_tasks(given, ["GPU:0", "GPU:1"], NO_GPUS)
    assert isinstance(check, Check)
    assert (check.status, check.figure) == ("skipped", "its 4 devices are those of several machines")


@pytest.mark.extended
@with_children
def test_the_line_of_an_operation_on_the_host_is_found_in_a_pipeline() -> None:
    settings = ("strategy.kind=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=2")
    given = source(doctor_models.on_the_host, overrides=settings)
    tasks = models._strategy_tasks(given, ["CPU:0", "CPU:1"], NO_GPUS)
    assert isinstance(tasks, list)
    (outcome,) = child_processes.run_tasks([task for task in tasks if task.name == "place"])
    line = doctor_models.line_of("raw_ops.UniqueV2")
    place = f"(doctor_models.py:{line}) run on the host: UniqueV2"
    assert place in models.judged_placement(outcome.result).figure


@with_children
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_a_device_that_computes_a_model_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "PROGRAM", faulty_devices.__name__)
    monkeypatch.setenv(faulty_devices.VARIABLE, "model CPU:1")
    monkeypatch.setattr(models, "_strategy_tasks", lambda *_: SKIPPED)
    found = checked(source(doctor_models.classifier), ["CPU:0", "CPU:1"])
    assert [name for name, check in found.items() if check.status == "WRONG"] == ["model on CPU:1"]
    assert "the gradient of sequential" in found["model on CPU:1"].figure


@with_children
@pytest.mark.parametrize(
    ("given", "figure", "way_out"),
    [
        (source(doctor_models.raising), "your code raises KeyError: 'width'", "doctor_models.py:"),
        (source(doctor_models.raising_layer), "when calling Raising.call(). Could not", "doctor_models.py:"),
        (source(doctor_models.exiting), "your code raises SystemExit: 2", "doctor_models.py:"),
        (source(doctor_models.not_compiled), "is not compiled. Call model.compile(optimizer, loss)", ""),
        (source(doctor_models.without_shapes), "name its data, too, with --data", ""),
    ],
    ids=["raises", "raises in a layer", "exits", "not compiled", "without shapes"],
)
def test_a_model_function_that_fails_is_reported_as_the_users(given: ModelSource, figure: str, way_out: str) -> None:
    found = checked(given, ["CPU:0"])
    assert list(found) == ["model"]
    assert found["model"].status == "WRONG"
    assert figure in found["model"].figure
    assert way_out in found["model"].way_out
    if way_out:
        line = int(found["model"].values["place"].rpartition(":")[2])
        with open(doctor_models.__file__) as file:
            assert "the line that the doctor names" in file.read().splitlines()[line - 1]


@pytest.mark.extended
@with_children
def test_data_of_a_model_function_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_strategy_tasks", lambda *_: SKIPPED)
    data = f"{doctor_models.__name__}:data"
    found = checked(source(doctor_models.without_shapes, data=data), [])
    assert found["model"].status == "ok"


@pytest.mark.parametrize("name", ["build_model", "nowhere.py:build_model", "tfpar:nothing", "tests.support:"])
def test_a_function_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"function|file"):
        function_of(name)


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
    check = examined(ModelSource(overrides=("strategy.kind=mirrored",), **names), logical_cpus[1:3])
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
        function_of(f"{tmp_path / 'unguarded.py'}:build_model")


def test_a_function_that_no_process_can_import_is_refused() -> None:
    with pytest.raises(ValueError, match="Move it to a file"):
        tfpar.doctor(lambda: None, verbose=0)


@pytest.mark.parametrize("kind", ["mirrored", "pipeline"])
@pytest.mark.parametrize(
    ("function", "switched_off", "bound"),
    [
        (doctor_models.augmented, ["turns"], "1e-05 in float32, as the model does not compute in float64 ("),
        (doctor_models.top_k, [], "1e-05 in float32, as the model does not compute in float64 ("),
        (doctor_models.random_and_normalized, ["drops", "samples", "normalizes"], "1e-09 in float64"),
        (doctor_models.own_metrics, [], "1e-09 in float64"),
    ],
)
@pytest.mark.crossed
def test_what_differs_by_design_is_no_finding(
    kind: str, function: Callable[[], Any], switched_off: list[str], bound: str, logical_cpus: list[str]
) -> None:
    check = examined(source(function, overrides=(f"strategy.kind={kind}", *PIPELINE[kind])), logical_cpus[1:3])
    assert check.status == "ok", check.figure
    assert check.values["switched_off"] == switched_off
    assert check.bound.startswith(bound)
    assert not switched_off or f"with {', '.join(switched_off)} switched off" in check.figure


PIPELINE = {"mirrored": (), "pipeline": ("strategy.num_stages=2", "strategy.num_microbatches=2")}


def examined(given: ModelSource, devices: list[str]) -> Check:
    """The check of a strategy, in this process."""
    import keras

    try:
        result = strategy_task.compare(dataclasses.asdict(given), devices)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    return models.judged_strategy(result)


def test_a_strategy_is_compared_on_one_batch_of_a_shuffled_dataset(logical_cpus: list[str]) -> None:
    overrides = (f"trainer={doctor_models.__name__}.Shuffled", "strategy.kind=mirrored")
    check = examined(ModelSource(overrides=overrides), logical_cpus[1:3])
    assert check.status == "ok", check.figure


RESULT = {
    "strategy": "Mirrored",
    "logs": {"loss": 0.0},
    "weights": {"a": 1e-12, "b": 0.1},
    "finite": True,
    "conditions": "",
    "bound": 1e-9,
    "precision": "float64",
}


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, "WRONG", "b differs by 1.0e-01"),
        ({"conditions": "with dropout switched off"}, "WRONG", "after three steps, with dropout switched off"),
        ({"weights": {}, "logs": {"loss": 0.1}}, "WRONG", "the loss differs by 1.0e-01"),
        ({"bound": 0.5, "precision": "float32"}, "ok", "differ by 1.0e-01"),
        ({"finite": False}, "WRONG", "not finite"),
        ({"weights": {"a": 1e-12}}, "ok", "differ by 1.0e-12"),
    ],
)
def test_three_steps_of_a_strategy_are_judged(changes: dict[str, Any], status: str, said: str) -> None:
    check = models.judged_strategy(RESULT | changes)
    assert check.status == status
    assert said in check.figure


@pytest.mark.parametrize(
    ("settings", "on_cpus", "on_gpus"),
    [
        (config.Auto(), 1, 4),
        (config.SingleDevice(), 1, 1),
        (config.Mirrored(), 4, 4),
        (config.Mirrored(num_logical_cpus=2), 2, 4),
        (config.Mirrored(devices=("GPU:1", "GPU:3")), 2, 2),
        (config.Pipeline(num_stages=3, num_microbatches=4), 3, 3),
        (config.Pipeline(num_stages=4, num_microbatches=4, schedule="interleaved"), 2, 2),
        (config.Hybrid(num_stages=2, num_microbatches=4, num_shards=2, num_replicas=3), 12, 12),
        (config.Hybrid(num_stages=1, num_microbatches=4, num_shards=2, devices=("CPU:0", "CPU:1")), 2, 2),
    ],
)
def test_a_strategy_is_tried_on_as_many_devices_as_it_trains_on(
    settings: config.Strategy, on_cpus: int, on_gpus: int
) -> None:
    found = [models.num_devices(settings, 4, on_gpus=kind) for kind in (False, True)]
    assert found == [on_cpus, on_gpus]


def operation(kind: str, layer: str, line: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "layer": layer}
    return found | ({"file": "/models/model.py", "line": line, "function": "MyLayer.call"} if line else {})


@pytest.mark.parametrize(
    ("on_host", "said"),
    [
        ([], "none of 1,234 operations runs on the host between two of a GPU"),
        (
            [operation("Unique", "mine", 41), operation("Where", "mine", 43), operation("Unique", "mine", 41)],
            "3 operations of `MyLayer.call` (model.py:41, 43) run on the host: Unique, Where (1,234 operations in a",
        ),
        ([operation("Where", "theirs")], "1 operation of `theirs` runs on the host: Where"),
        ([operation("Where", "")], "1 operation of `the step` runs on the host: Where"),
        ([operation("Where", f"layer {number}") for number in range(7)], "on the host: Where; 2 more places"),
    ],
)
def test_operations_on_the_host_are_named_by_function_or_layer(on_host: list[dict[str, Any]], said: str) -> None:
    result = {"on_host": on_host, "num_operations": 1234, "num_waits": 5}
    check = models.judged_placement(result)
    assert check.status == ("slow" if on_host else "ok")
    assert said in check.figure


def one_step(gradient: float, weight: float) -> dict[str, Any]:
    """A step with a weight of large gradients, and one whose gradient is zero but for rounding."""
    return {
        "paths": ["kernel", "key/bias"],
        "loss": 1.0,
        "gradients": [np.array([1.0, 2.0]), np.array([gradient])],
        "weights": [np.array([0.5, 0.5]), np.array([weight])],
        "policy": "float32",
    }


def test_a_weight_whose_gradient_is_rounding_is_not_compared() -> None:
    exact = one_step(1e-18, -0.001)
    assert models.compared("GPU:0", one_step(1e-9, 0.001), exact, "the CPU in float64").status == "ok"
    wrong = models.compared("GPU:0", one_step(0.1, 0.001), exact, "the CPU in float64")
    assert (wrong.status, wrong.values["first"]) == ("WRONG", "the gradient of key/bias")


@pytest.mark.parametrize("value", [float("nan"), 1.01])
def test_a_loss_that_differs_is_wrong(value: float) -> None:
    check = models.compared("GPU:0", {**one_step(0.0, 0.0), "loss": value}, one_step(0.0, 0.0), "the CPU in float64")
    assert (check.status, check.values["first"]) == ("WRONG", "the loss")


def test_an_error_of_a_device_in_the_users_code_is_not_the_users() -> None:
    outcome = child_processes.Outcome(None, "ResourceExhaustedError: out of memory", "train.py:7")
    assert "your code raises" in models.failure("model", outcome, is_first=True).figure
    check = models.failure("model on GPU:0", outcome)
    assert check.figure == "ResourceExhaustedError: out of memory (at train.py:7, which runs on the CPU)"

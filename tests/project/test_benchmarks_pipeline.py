"""The pipeline experiments: rounds, findings, comparisons, tables; and each measurement once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import peers, process
from benchmarks.harness import Experiment, Round
from benchmarks.pipelines import worker
from benchmarks.pipelines.examples import arrays
from benchmarks.pipelines.experiments import PIPELINE_EXPERIMENTS, PIPELINE_MEMORY, PIPELINE_PREDICTION
from benchmarks.pipelines.figures import efficiency, quotient, ratio, saved, saved_share, spread
from benchmarks.pipelines.setting import Setting
from benchmarks.pipelines.speed import PIPELINE_MLP, PIPELINE_TRANSFORMER
from benchmarks.pipelines.workers import HYBRID, PIPELINE_WORKERS
from benchmarks.process import WorkerError
from tests.support.extent import sampled

OURS = Setting("mlp", "pipeline", num_microbatches=8, microbatch_size=64)
FIGURES = {
    "laps": ("step_seconds", "processor_seconds", "num_parameters"),
    "prediction": ("step_seconds", "processor_seconds", "num_parameters", "predicted_seconds"),
    "memory": ("peak_bytes", "predicted_bytes"),
    "first_step": ("first_step_seconds", "processor_seconds", "model_seconds", "second_step_seconds"),
    "parts": ("forward_seconds", "backward_seconds", "update_seconds", "cut_bytes", "gradient_bytes"),
}


# Findings


@pytest.mark.parametrize(("num_stages", "num_microbatches", "ideal"), [(2, 8, 0.5625), (4, 8, 0.34375), (1, 8, 1.0)])
def test_efficiency_is_1_where_only_the_bubble_is_lost(num_stages: int, num_microbatches: int, ideal: float) -> None:
    setting = replace(OURS, num_stages=num_stages, num_microbatches=num_microbatches)
    outputs = {"T": {"step_seconds": 1.0}, "p": {"step_seconds": ideal}, "slow": {"step_seconds": 2 * ideal}}
    assert efficiency("p", setting, "T")(outputs) == pytest.approx(1.0)
    assert efficiency("slow", setting, "T")(outputs) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        (ratio("few", "many", "peak_bytes"), 0.25),
        (ratio("many", "many", "predicted_bytes", "peak_bytes"), 0.75),
        (spread(["few", "many"], "peak_bytes"), 4.0),
        (saved("few", "many", "peak_bytes"), 6.0),
        (saved_share("few", "many", "peak_bytes"), 0.75),
        (quotient(saved("few", "many", "peak_bytes"), saved("few", "many", "predicted_bytes")), 1.5),
    ],
)
def test_figures_are_computed_from_one_round(figure: Callable[[Round], float], value: float) -> None:
    outputs = {"few": {"peak_bytes": 2.0, "predicted_bytes": 2.0}, "many": {"peak_bytes": 8.0, "predicted_bytes": 6.0}}
    assert figure(outputs) == pytest.approx(value)


# The experiments


@pytest.mark.parametrize("experiment", PIPELINE_EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_finding_can_be_computed_from_the_figures_of_its_settings(experiment: Experiment) -> None:
    outputs = {
        name: dict.fromkeys(FIGURES[setting.quantity], 1000.0 + place)
        for place, (name, setting) in enumerate(experiment.settings.items())
    }
    for finding in experiment.findings:
        assert math.isfinite(finding.of(outputs)), finding.text
    texts = [finding.text for finding in experiment.findings]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("experiment", [PIPELINE_MLP, PIPELINE_TRANSFORMER], ids=lambda experiment: experiment.name)
def test_torch_runs_the_same_layers_sizes_and_microbatches(experiment: Experiment) -> None:
    theirs = {name: setting for name, setting in experiment.settings.items() if setting.trainer == "torch"}
    for name, setting in theirs.items():
        assert experiment.settings[name.replace("torch", "tfpar")] == replace(setting, trainer="pipeline")
    assert {(setting.schedule, setting.num_microbatches) for setting in theirs.values()} >= {
        (schedule, number) for schedule in ("1f1b", "gpipe") for number in (8, 16)
    }


@pytest.mark.parametrize(
    ("experiment", "sizes"),
    [(PIPELINE_MLP, {64, 32}), (PIPELINE_TRANSFORMER, {4, 2})],
    ids=lambda value: str(value)[:9],
)
def test_one_core_does_the_same_step_for_every_batch(experiment: Experiment, sizes: set[int]) -> None:
    settings = experiment.settings.values()
    assert {setting.microbatch_size for setting in settings if setting.num_stages == 2} == sizes
    for trainer in ("one_device", "pipeline"):
        on_one_core = [setting for setting in settings if setting.num_devices == 1 and setting.trainer == trainer]
        assert {setting.num_stages for setting in on_one_core} == {1}
        assert {setting.batch_size for setting in on_one_core} == {setting.batch_size for setting in settings}


def test_predictions_are_made_for_one_global_batch_and_all_four_schedules() -> None:
    settings = PIPELINE_PREDICTION.settings.values()
    assert {(setting.batch_size, setting.num_devices) for setting in settings} == {(32, 2)}
    assert {setting.schedule for setting in settings} == {"gpipe", "1f1b", "interleaved", "zero_bubble"}


def test_memory_is_measured_with_micro_batches_of_one_size() -> None:
    assert len({setting.microbatch_size for setting in PIPELINE_MEMORY.settings.values()}) == 1


@pytest.mark.parametrize(
    ("workload", "inputs", "targets"),
    [
        ("mlp", (2, 512), (2, 512)),
        ("transformer", (2, 128, 256), (2, 128, 256)),
        ("wide", (2, 16), (2, 16)),
        ("resnet50", (2, 64, 64, 3), (2,)),
    ],
)
def test_a_workload_has_as_many_rows_as_asked_for(
    workload: str, inputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    assert tuple(array.shape for array in arrays(workload, 2)) == (inputs, targets)


# Turns


@pytest.mark.parametrize("changes", [{"trainer": "torch"}, {"trainer": "torch_sharded", "num_stages": 1}])
def test_torch_has_a_process_a_stage_or_part_and_the_slowest_counts(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, Any]] = []

    def ask_all(module: str, requests: list[Mapping[str, Any]], **_: Any) -> list[dict[str, Any]]:
        asked.extend(requests)
        return [
            {"lap_seconds": [0.5, 0.1, 0.2], "lap_processor_seconds": [0.1] * 3, "num_parameters": 10},
            {"lap_seconds": [0.5, 0.1, 0.3], "lap_processor_seconds": [0.2] * 3, "num_parameters": 20},
        ]

    monkeypatch.setattr(process, "ask_all", ask_all)
    monkeypatch.setattr(peers, "install", lambda peer: None)
    output = worker.measure(replace(OURS, **changes))
    assert output == pytest.approx({"step_seconds": 0.3, "processor_seconds": 0.3, "num_parameters": 30})
    assert [request["rank"] for request in asked] == [0, 1]
    assert len(set(asked[0]["addresses"])) == 2


@pytest.mark.multi_process
def test_too_few_cores_are_refused_before_tensorflow_starts() -> None:
    with pytest.raises(WorkerError, match=r"needs 100000 cores, and the process may use \d+"):
        worker.measure(replace(OURS, num_devices=100_000))


SMALL = Setting("mlp", "one_device", num_microbatches=2, microbatch_size=2, num_laps=2, steps_per_lap=1)


@pytest.mark.parametrize(
    "setting",
    [
        SMALL,
        replace(SMALL, quantity="memory"),
        replace(SMALL, trainer="keras", quantity="first_step"),
        replace(SMALL, trainer="pipeline", quantity="parts", schedule="interleaved", num_stages=8),
    ],
    ids=lambda setting: setting.quantity,
)
@pytest.mark.usefixtures("logical_cpus")
def test_a_quantity_is_measured_with_its_figures(setting: Setting) -> None:
    from benchmarks.pipelines.measurements import MEASUREMENTS

    output = MEASUREMENTS[setting.quantity](setting)
    expected = ("peak_bytes",) if setting.quantity == "memory" else FIGURES[setting.quantity]
    assert set(output) == set(expected)
    # A step of four rows may need no page that was not there.
    assert all(value > 0 for figure, value in output.items() if figure != "peak_bytes")


@pytest.mark.extended
@pytest.mark.multi_process
@pytest.mark.parametrize(
    "name",
    sampled(
        ("tfpar, mlp", "tfpar.Hybrid, 2 workers x 2 stages", "tfpar.MultiWorker, 2 workers"),
        of_ci=("tfpar.Hybrid, 2 workers x 2 stages",),
    ),
)
def test_two_workers_are_measured_as_one(name: str) -> None:
    settings = {**PIPELINE_WORKERS.settings, **HYBRID.settings}
    small = replace(settings[name], workload="mlp", num_microbatches=2, microbatch_size=2, num_laps=1, steps_per_lap=1)
    output = worker.measure(small)
    assert set(output) == set(FIGURES["laps"])
    assert output["num_parameters"] == 8 * (512 * 512 + 512)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"activation_bytes": (100, 100), "backward_temporary_bytes": (0, 0)}, 300),  # two on device 0, one on device 1
        # Device 1 has made all again when device 0, a second ahead, has let half of its go.
        ({"activation_bytes": (0, 0), "backward_temporary_bytes": (100, 100)}, 150),
    ],
)
def test_devices_that_share_a_memory_need_the_most_at_different_times(sizes: Any, expected: float) -> None:
    from benchmarks.pipelines.memory import together_bytes
    from tfpar.pipeline import schedule
    from tfpar.pipeline.analysis.prediction import Prediction
    from tfpar.pipeline.schedule.simulator import Durations, simulate

    durations = Durations((1.0, 1.0), (3.0, 3.0), (), (), transfer_seconds=(0.0,), **sizes)
    planned = simulate(schedule.make("1f1b", 2, 8), durations)
    assert together_bytes(Prediction((), durations, planned)) == pytest.approx(expected)

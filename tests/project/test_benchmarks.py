"""The benchmarks run: the command, settings, one tiny round of the real thing, the tables of the documentation."""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import harness, parity_table, process, step_times
from benchmarks.experiments import EXPERIMENTS
from benchmarks.gpus import budget, contenders, table
from benchmarks.gpus.setting import GpuSetting
from benchmarks.harness import Experiment, Target
from benchmarks.measurement import Measurement
from benchmarks.one_core import MODELS, ONE_CORE, TWO_DEVICES
from benchmarks.results import ResultFile
from benchmarks.scaling.layouts import as_markdown
from benchmarks.scaling.layouts import experiment as scaling
from benchmarks.worker import measure
from tests import ROOT
from tests.support.extent import is_whole

MACHINE = {"cores": 2}
TINY = GpuSetting("", "tiny", "tfpar", batch_size=4, devices=(), num_laps=1, steps_per_lap=2)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.multi_process
def test_the_command_lists_experiments_and_refuses_what_it_cannot_measure() -> None:
    names = [line.split()[0] for line in benchmarks().stdout.splitlines()]
    assert {one.name for one in EXPERIMENTS} <= {*names}
    documented = re.findall(r"^(?:\| |- )`(\w+)`", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert {*documented} < {*names}
    unknown = benchmarks("cnnn")
    assert unknown.returncode == 1
    assert f"no experiment 'cnnn'. There are: {', '.join(names)}, all." in unknown.stderr
    no_gpu = benchmarks("gpu")
    assert (no_gpu.returncode, no_gpu.stdout) == (1, "")
    assert no_gpu.stderr.startswith("python -m benchmarks gpu measures GPUs, and this process sees none. Run it on")


def test_the_targets_of_an_experiment_name_its_contenders() -> None:
    for experiment in EXPERIMENTS:
        named = {name for target in experiment.findings for name in (*target.ours, *target.theirs)}
        assert named == {*experiment.settings}, experiment.name


def test_each_model_is_compared_with_keras_and_with_another_commit() -> None:
    steps = {"step_seconds": 1.0, "step_processor_seconds": 1.0}
    for experiment in (ONE_CORE, step_times.against(TWO_DEVICES, "f00dfeed" * 5)):
        outputs = dict.fromkeys(experiment.settings, steps)
        assert [finding.of(outputs) for finding in experiment.findings] == [1.0] * len(experiment.findings)
        assert len(experiment.findings) >= 2 * len(MODELS)


def test_every_case_of_the_parity_table_has_its_model_and_data() -> None:
    from benchmarks import parity_cases

    assert tuple(parity_cases.CASES) == parity_table.CASES


def test_the_tables_of_the_documentation_are_those_of_the_stored_parts() -> None:
    documented = (ROOT / "docs" / "scaling.md").read_text()
    for one in as_markdown(harness.run_rounds(scaling(), 1)):
        assert one in documented, "run python -m benchmarks scaling"


@pytest.mark.multi_process
@pytest.mark.slow_start
def test_a_tiny_experiment_runs_from_end_to_end_and_is_resumed(tmp_path: Path) -> None:
    keras = Measurement("host_bound", "keras", 8, 4, 2, cores=1, intra_op_threads=1, inter_op_threads=1)
    replicas = Measurement("host_bound", "tfpar", 4, 4, 2, num_replicas=2)
    settings, target = {"two": replicas, "Keras": keras}, Target(("two",), ("Keras",), 1)
    once = functools.cache(measure)
    measured = measure if is_whole() else lambda setting: once(replicas)  # Keras' process is not started in CI
    tiny = Experiment("tiny", "few steps", "examples_per_second", settings, measured, (target,))
    path = tmp_path / "results.json"
    result = harness.run_rounds(tiny, 1, save=ResultFile(path, MACHINE).save)
    (entry,) = json.loads(path.read_text())["experiments"]
    assert entry["findings"][0]["rounds"] == pytest.approx([result.found(result.findings[0])])
    finished = ResultFile(path, MACHINE, resume=True).rounds_of(tiny)
    assert harness.run_rounds(tiny, 1, finished=finished).rounds == result.rounds


@pytest.mark.multi_process
def test_a_worker_that_fails_says_why_and_one_that_hangs_is_ended() -> None:
    with pytest.raises(process.WorkerError, match=r"exit status 1: [\s\S]*needs 100000 cores"):
        measure(Measurement("host_bound", "tfpar", 8, num_steps=4, num_warm_up_steps=2, cores=100_000))
    with pytest.raises(process.WorkerError, match=r"no output within 0\.01 seconds"):
        process.ask("benchmarks.worker", {}, timeout_seconds=0.01)


@pytest.mark.parametrize("number", [1, 4])
def test_gpus_that_get_no_time_are_named_in_the_order_of_their_turns(number: int) -> None:
    turns = contenders.turns([f"GPU:{index}" for index in range(number)], with_torch=True)
    settings = [setting for turn in turns for setting in turn]
    assert len({setting.label for setting in settings}) == len(settings)
    outputs = budget.run(turns, 1.0, ResultFile(None, MACHINE))
    assert table.as_markdown(turns, outputs) == (
        "Not measured yet, and measured by the same command with --resume: "
        f"{'; '.join(setting.label for setting in settings)}."
    )


@pytest.mark.extended
@pytest.mark.multi_process
@pytest.mark.slow_start
def test_gpus_are_measured_with_cpus_in_their_place_and_a_failure_ends_its_own_setting_alone(tmp_path: Path) -> None:
    keras, tfpar, *others = contenders.turns(["CPU:0"], [TINY], with_torch=False)
    late = tuple(replace(setting, name="late", limit_seconds=0.01) for setting in keras[:1])
    wrong = tuple(replace(setting, name="wrong", devices=("CPU:9",)) for setting in tfpar[:1])
    turns = [late, wrong, keras, tfpar, *(turn for turn in others if turn[0].quantity == "parity")]
    path = tmp_path / "results.json"
    outputs = budget.run(turns, 550.0, ResultFile(path, MACHINE))
    assert budget.finished(turns, ResultFile(path, MACHINE, resume=True)) == outputs
    assert [setting for turn in turns for setting in turn] == [*outputs]
    failed = {setting.name: output["failed"] for setting, output in outputs.items() if "failed" in output}
    assert {*failed} == {"late", "wrong"}
    assert failed["late"] == "more than 0.01 s"
    parity = [output for setting, output in outputs.items() if setting.quantity == "parity"]
    assert parity
    assert all(output["largest_difference"] <= output["tolerance"] for output in parity)
    rows = table.as_markdown(turns, outputs).splitlines()
    assert sum(row.startswith("| tiny") for row in rows) == len(outputs) - len(parity)

"""The benchmark harness: turns, medians, ratios, tables, JSON, processes; and one tiny run of the real thing."""

import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console

from benchmarks import all_reduce, harness, parity_table, peers, process, report, restart
from benchmarks.examples import ARRAYS
from benchmarks.experiments import CNN, COMMUNICATION_BOUND, EXPERIMENTS, MIRRORED, MULTI_WORKER
from benchmarks.harness import Experiment, Finding, Target
from benchmarks.machine import describe_machine
from benchmarks.measurement import Measurement
from benchmarks.results import ResultFile, as_json
from benchmarks.vocabulary_loss import VOCABULARY_LOSS
from benchmarks.wide_features import WIDE_FEATURES
from benchmarks.worker import measure
from tests import ROOT

NAMES = (
    "host_bound, cnn, mirrored, multi_worker, communication_bound, slow_network, checkpoint_cost, "
    "pipeline_mlp, pipeline_transformer, pipeline_memory, pipeline_prediction, pipeline_first_step, pipeline_workers, "
    "hybrid, fully_sharded, hybrid_sleeping, workers_sleeping, scaling_parts, scaling, all_reduce, "
    "restart, shards, tensor_parallel, vocabulary_loss, wide_features, plan, plan_seconds, plan_memory, "
    "plan_sleeping, plan_hosts, parity_table, gpu"
)
MACHINE = {"cores": 2, "load_of_the_last_minute": 0.5}
OURS = Measurement("host_bound", "tfpar", batch_size=8, num_steps=100, num_warm_up_steps=2)
THEIRS = Measurement("host_bound", "keras", batch_size=8, num_steps=100, num_warm_up_steps=2)
OTHERS = Measurement("host_bound", "keras", batch_size=8, num_steps=100, num_warm_up_steps=2, steps_per_execution=4)


def experiment(figure: str = "steps_per_second", at_least: float | None = 2.0, **settings: Any) -> Experiment:
    contenders = {"tfpar": OURS, "Keras fit": THEIRS, "Keras fit, 4": OTHERS}
    target = Target(("tfpar",), ("Keras fit", "Keras fit, 4"), at_least)
    return Experiment("toy", "a toy", figure, contenders, measured(), (target,), **settings)


def measured() -> Callable[[Measurement], dict[str, float]]:
    """A measurement of a machine that is three times slower in the second round."""
    speeds = {OURS: [20.0, 20.0 / 3, 40.0], THEIRS: [5.0, 5.0 / 3, 4.0], OTHERS: [2.5, 2.5 / 3, 2.0]}
    turns = {measurement: itertools.cycle(values) for measurement, values in speeds.items()}

    def measure_one(measurement: Measurement) -> dict[str, float]:
        speed = next(turns[measurement])
        return {"steps_per_second": speed, "examples_per_second": 8 * speed, "training_seconds": 100 / speed}

    return measure_one


def three_rounds(**settings: Any) -> harness.Result:
    return harness.run_rounds(experiment(**settings), 3)


@pytest.mark.parametrize(
    ("experiment", "figures"),
    [(VOCABULARY_LOSS, ("peak_bytes", "scores_bytes")), (WIDE_FEATURES, ("steps_per_second", "received_bytes"))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_findings_of_divided_layers_are_computed_from_their_figures(
    experiment: Experiment, figures: tuple[str, ...]
) -> None:
    outputs = {name: dict.fromkeys(figures, 10.0 + place) for place, name in enumerate(experiment.settings)}
    result = harness.Result(experiment, [outputs])
    assert len(result.findings) >= 3
    assert all(0 < result.found(finding) < 2 for finding in result.findings)


def test_settings_take_turns_round_by_round() -> None:
    turns: list[Measurement] = []

    def measure_one(measurement: Measurement) -> dict[str, float]:
        turns.append(measurement)
        return {"step_seconds": 1.0}

    lines: list[str] = []
    harness.run_rounds(replace(experiment(), measure=measure_one), 2, lines.append)
    assert turns == [OURS, THEIRS, OTHERS] * 2
    assert lines[3] == "toy, round 2 of 2: tfpar: step ms 1,000.0"


def test_the_median_round_counts_for_a_setting() -> None:
    assert three_rounds().median("tfpar", "steps_per_second") == pytest.approx(20.0)


def test_a_finding_is_the_median_of_those_within_rounds() -> None:
    result = three_rounds()
    (finding,) = result.findings
    # Within the rounds 4, 4 and 10; the ratio of the medians would be 5.
    assert result.found(finding) == pytest.approx(4.0), "a round that was slow for both sides must not tilt the ratio"


def test_a_target_is_taken_against_the_best_of_theirs() -> None:
    (finding,) = three_rounds().findings
    assert finding.text == "tfpar / Keras fit"


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({}, True),
        ({"at_least": 4.0}, True),
        ({"at_least": 4.01}, False),
        ({"at_most": 4.0}, True),
        ({"at_most": 3.99}, False),
        ({"at_least": 4.1, "at_most": 4.2}, False),
    ],
)
def test_a_finding_is_met_within_its_limits(limits: dict[str, float], met: bool) -> None:
    result = three_rounds()
    assert result.met(Finding("a ratio", result.findings[0].of, **limits)) is met


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 round, received 0"):
        harness.run_rounds(experiment(), 0)


def test_an_experiment_without_rounds_has_one() -> None:
    assert len(harness.run_rounds(experiment(has_rounds=False), 5).rounds) == 1


@pytest.mark.parametrize(
    ("figure", "value", "expected"),
    [
        ("step_seconds", 1.25, ("step ms", "1,250.0")),
        ("peak_bytes", 2.5e9, ("peak MB", "2,500.0")),
        ("num_parameters", 2_101_248, ("num parameters", "2,101,248")),
        ("gigabytes_per_second", 0.34567, ("gigabytes per second", "0.346")),
        ("error", "no message", ("error", "no message")),
    ],
)
def test_a_figure_is_shown_in_a_readers_unit(figure: str, value: float | str, expected: tuple[str, str]) -> None:
    assert harness.shown(figure, value) == expected


def printed(result: harness.Result) -> str:
    console = rich.console.Console(width=160, file=io.StringIO())
    report.print_result(result, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_predictions_have_a_row_for_each_layout() -> None:
    def output(_: Measurement) -> dict[str, float]:
        seconds = {"predicted Mirrored(2)": 0.075, "measured Mirrored(2)": 0.06}
        return seconds | {"tensors Mirrored(2)": 3e7, "regret of prediction alone": 1.25}

    text = printed(harness.run_rounds(replace(experiment(), measure=output, findings=()), 1))
    for part in (
        r"rounds +┃ regret of prediction alone ┃\n",
        r"rounds +┃ predicted ┃ measured ┃ ratio ┃ +tensors ┃ ratio ┃",
        r"tfpar +│ +│ +│ +│ +│ +│\n│ +Mirrored\(2\) +│ +75 ms │ +60 ms │ +1\.25 │ 30\.0 MB │",
    ):
        assert re.search(part, text), f"no {part!r} in\n{text}"


def test_the_tables_show_medians_rounds_and_a_missed_target_and_leave_out_missing_figures() -> None:
    def output(measurement: Measurement) -> dict[str, float]:
        return {**measured_speed(measurement), **({"peak_bytes": 2.5e6} if measurement == THEIRS else {})}

    measured_speed = measured()
    text = printed(harness.run_rounds(replace(experiment(at_least=6.0), measure=output), 3))
    for part in (
        r"steps per second ┃ lowest ┃ highest ┃ examples per second ┃ training ms ┃ peak MB",
        r"tfpar +│ +20 │ +6\.67 │ +40 │ +160 │ +5,000\.0 │ +│",
        r"Keras fit +│ +4 │ .* 2\.5 │",
        r"tfpar / Keras fit +│ +4\.000 │ at least 6 │ MISSED",
    ):
        assert re.search(part, text), f"no {part!r} in\n{text}"


# The file of results


def saved_rounds(path: Path, num_rounds: int = 3) -> None:
    results = ResultFile(path, MACHINE)
    harness.run_rounds(experiment(), num_rounds, save=results.save)


def test_the_file_holds_machine_settings_rounds_and_findings(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved_rounds(path)
    written = json.loads(path.read_text())
    (entry,) = written["experiments"]
    assert written["machine"] == MACHINE
    assert entry["settings"]["Keras fit, 4"]["setting"]["steps_per_execution"] == 4
    ours = entry["settings"]["tfpar"]
    assert [output["steps_per_second"] for output in ours["rounds"]] == pytest.approx([20.0, 20.0 / 3, 40.0])
    assert ours["medians"]["training_seconds"] == pytest.approx(5.0)
    (finding,) = entry["findings"]
    assert finding["rounds"] == pytest.approx([4.0, 4.0, 10.0])
    assert (finding["value"], finding["at_least"], finding["at_most"], finding["met"]) == (4.0, 2.0, None, True)


def test_a_resumed_run_measures_only_the_rounds_that_are_missing(tmp_path: Path) -> None:
    def interrupted(measurement: Measurement) -> dict[str, float]:
        turns.append(measurement)
        if len(turns) == 5:
            raise process.WorkerError("interrupted")
        return {"steps_per_second": float(len(turns))}

    turns: list[Measurement] = []
    path, toy = tmp_path / "results.json", replace(experiment(), measure=interrupted)
    with pytest.raises(process.WorkerError):
        harness.run_rounds(toy, 3, save=ResultFile(path, MACHINE).save)
    results = ResultFile(path, {**MACHINE, "load_of_the_last_minute": 2.0}, resume=True)
    finished = results.rounds_of(toy)
    # The second round has to be measured whole: only what ran next to each other is compared.
    result = harness.run_rounds(toy, 3, finished=finished, save=results.save)
    assert result.figures("tfpar", "steps_per_second") == [1.0, 6.0, 9.0]
    assert ResultFile(path, MACHINE, resume=True).rounds_of(toy) == result.rounds


def test_the_results_of_other_experiments_stay_in_a_resumed_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved_rounds(path)
    other = replace(experiment(), name="other")
    harness.run_rounds(other, 1, save=ResultFile(path, MACHINE, resume=True).save)
    assert [entry["name"] for entry in json.loads(path.read_text())["experiments"]] == ["toy", "other"]


def test_without_resume_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved_rounds(path)
    assert ResultFile(path, MACHINE).rounds_of(experiment()) == []
    assert json.loads(path.read_text())["experiments"] == []


@pytest.mark.parametrize("text", ["", "[]", '{"machine": {}}', '{"machine": {}, "experiments": [3]}'])
def test_a_file_without_results_is_not_resumed_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json holds no results to resume: .* Leave --resume out"):
        ResultFile(path, MACHINE, resume=True)
    assert path.read_text() == text


def test_rounds_of_another_machine_or_other_settings_are_not_put_together(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved_rounds(path)
    with pytest.raises(ValueError, match="holds results with cores = 2, and here it is 8"):
        ResultFile(path, {**MACHINE, "cores": 8}, resume=True)
    other = replace(experiment(), settings={"tfpar": replace(OURS, batch_size=16)})
    with pytest.raises(ValueError, match="holds rounds of toy with other settings"):
        ResultFile(path, MACHINE, resume=True).rounds_of(other)


# The experiments


@pytest.mark.parametrize("real", EXPERIMENTS, ids=lambda real: real.name)
def test_the_targets_of_an_experiment_name_its_contenders(real: Experiment) -> None:
    named = {name for target in real.findings for name in (*target.ours, *target.theirs)}
    assert named == set(real.settings)


@pytest.mark.parametrize("target", CNN.findings[:-1], ids=lambda target: target.ours[0])
def test_both_sides_of_the_cnn_differ_in_nothing_but_the_trainer(target: Target) -> None:
    (ours,), (theirs,) = target.ours, target.theirs
    assert {**vars(CNN.settings[ours]), "trainer": "keras"} == vars(CNN.settings[theirs])


def test_mirrored_gives_each_replica_the_batch_of_the_single_device() -> None:
    one, two, _ = MIRRORED.settings.values()
    assert two.batch_size == two.num_replicas * one.batch_size
    assert (one.cores, two.cores) == (1, 2)


@pytest.mark.parametrize("experiment_of_workers", [MULTI_WORKER, COMMUNICATION_BOUND], ids=lambda real: real.name)
def test_each_worker_has_one_core_and_the_batch_of_one_worker_alone(experiment_of_workers: Experiment) -> None:
    contenders = experiment_of_workers.settings.values()
    assert {contender.batch_size / contender.num_workers for contender in contenders} == {
        experiment_of_workers.settings["tfpar, 1 worker"].batch_size
    }
    assert {contender.num_workers for contender in contenders} == {1, 2}
    assert {(contender.intra_op_threads, contender.inter_op_threads) for contender in contenders} == {(1, 1)}


@pytest.mark.parametrize(
    ("workload", "shapes"),
    [
        ("host_bound", [(6, 20), (6, 1)]),
        ("cnn", [(6, 28, 28, 1), (6,)]),
        ("dense", [(6, 2048), (6, 2048)]),
    ],
)
def test_a_workload_has_as_many_rows_as_asked_for(workload: str, shapes: list[tuple[int, ...]]) -> None:
    assert [array.shape for array in ARRAYS[workload](6)] == shapes


def test_the_machine_is_described_with_its_versions() -> None:
    machine = describe_machine()
    assert {"processor", "cores", "python", "tensorflow", "keras", "tfpar"} <= machine.keys()
    assert all(str(value) for value in machine.values())


# The parity table


def cells(monkeypatch: pytest.MonkeyPatch) -> harness.Result:
    def ask(module: str, request: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
        if request["trainer"] == "tfpar":
            return {"difference": 3e-16}
        if request["case"] == "hangs":
            raise process.WorkerError("no output within 180 seconds")
        return {"difference": 0.2412} if request["case"] == "differs" else {"error": "a | b"}

    monkeypatch.setattr(process, "ask", ask)
    return harness.run_rounds(parity_table.experiment(("differs", "fails", "hangs")), 5)


def test_the_parity_table_is_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parity_table.as_markdown(cells(monkeypatch)).splitlines() == [
        "| Case | Keras `fit`, `MirroredStrategy` | `tfpar.Mirrored` |",
        "| --- | --- | --- |",
        "| differs | differs by 2.4e-01 | equal |",
        "| fails | crashes: a \\| b | equal |",
        "| hangs | crashes: no output within 180 seconds | equal |",
    ]


def test_the_parity_table_counts_the_cases_that_equal_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = cells(monkeypatch)
    assert [(result.found(finding), result.met(finding)) for finding in result.findings] == [(0, True), (3, True)]
    assert "keras: cases that equal one device, of 3" in printed(result)
    assert "| differs |" in capsys.readouterr().out


def test_the_parity_table_as_json_keeps_the_figures_and_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads(json.dumps(as_json(cells(monkeypatch))))["settings"]
    assert settings["differs, keras"]["rounds"] == [{"difference": 0.2412}]
    assert settings["fails, keras"]["rounds"] == [{"error": "a | b"}]
    assert settings["fails, keras"]["medians"] == {}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'Graph execution error:\n\nDetected at node while/cond defined at\n  File "a.py", line 4\n\n'
            "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  You must feed a value\n\t [[{{node while/cond}}]]",
            "You must feed a value",
        ),
        (
            "Exception encountered when calling Cond.call().\n\n\x1b[1m`merge_call` called while defining a new graph "
            "or a tf.function. This can often happen",
            "`merge_call` called while defining a new graph or",
        ),
        ("{{function_node __wrapped__AddN}} Inputs must have the same size", "Inputs must have the same size"),
        ('in user code:\n\n  File "a.py", line 1\n    ValueError: No gradients', "No gradients"),
        ("", "no message"),
    ],
)
def test_an_error_is_shortened_to_its_reason(message: str, words: str) -> None:
    assert parity_table.first_words(message) == words


def test_every_case_of_the_parity_table_has_its_model_and_data() -> None:
    from benchmarks import parity_cases
    from tfpar.parity import TOLERANCES

    assert tuple(parity_cases.CASES) == parity_table.CASES
    assert TOLERANCES["float64"] == parity_table.TOLERANCE


# Peers


def test_a_peer_that_is_there_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPAR_BENCHMARK_PEERS", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", None)
    peers.folder("torch").mkdir()
    peers.install("torch")
    assert peers.folder("torch").parent == tmp_path


def test_a_peer_that_pip_cannot_install_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--target") + 1], "half").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 1, "", "no network\n")

    monkeypatch.setenv("TFPAR_BENCHMARK_PEERS", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(OSError, match=r"pip cannot install tf_keras~=2\.21 into .*: no network"):
        peers.install("tf_keras")
    assert list(tmp_path.iterdir()) == []


# The all-reduce


@pytest.mark.parametrize(("text", "size"), [("4KB", 4096), ("64MB", 64 << 20)])
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert all_reduce.size_bytes(text) == size


@pytest.mark.parametrize("text", ["4", "0KB", "4kb", "1.5MB"])
def test_a_size_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"such as 64KB, received '{text}'"):
        all_reduce.size_bytes(text)


@pytest.mark.parametrize(("num_workers", "sent"), [(2, 1000), (4, 1500), (1000, 1998)])
def test_the_model_sends_nearly_twice_the_bytes_over_many_workers(num_workers: int, sent: float) -> None:
    assert all_reduce.sent_bytes(1000, num_workers) == pytest.approx(sent)


def test_the_slowest_worker_and_the_middle_round_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([(1.0, 2.0), (9.0, 1.0), (4.0, 3.0)])

    def ask_all(module: str, requests: list[dict[str, Any]], **_: Any) -> list[dict[str, Any]]:
        return [{"found": [{"seconds": seconds, "processor_seconds": 0.5}]} for seconds in next(rounds)]

    monkeypatch.setattr(process, "ask_all", ask_all)
    result = harness.run_rounds(all_reduce.experiment(["gather"], [4 << 30]), 3)
    assert result.figures("gather", "4096 MB_seconds") == [2.0, 9.0, 4.0]
    assert re.search(r"gather +│ 4096 MB │ 4000\.00 │ +500\.00 │ +4096 MB │ 1\.074", printed(result))


def test_gloo_is_compared_with_tfpar_at_each_size() -> None:
    assert [finding.text for finding in all_reduce.ALL_REDUCE.findings[:2]] == [
        "4 KB: gloo / tfpar",
        "64 KB: gloo / tfpar",
    ]


# The restart


def test_a_record_has_whole_lines_only(tmp_path: Path) -> None:
    steps = [restart.Step(7, 0, 1.25), restart.Step(8, 1, 2.5)]
    assert restart.record(tmp_path) == []
    (tmp_path / "steps").write_text(restart.as_lines(steps) + "8 2 3.")
    assert restart.record(tmp_path) == steps


# Processes


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.multi_process
def test_without_a_name_the_experiments_are_listed_and_nothing_runs() -> None:
    listed = benchmarks()
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == NAMES.split(", ")


@pytest.mark.multi_process
def test_an_unknown_experiment_is_refused_with_the_names_that_exist() -> None:
    refused = benchmarks("cnnn")
    assert refused.returncode == 1
    assert f"no experiment 'cnnn'. There are: {NAMES}, all." in refused.stderr


@pytest.mark.multi_process
def test_a_file_that_cannot_be_written_is_refused_before_the_first_measurement(tmp_path: Path) -> None:
    refused = benchmarks("all", "--output", str(tmp_path / "missing" / "results.json"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("The results cannot be written:")
    assert "round 1" not in refused.stdout


@pytest.mark.multi_process
def test_resuming_needs_a_file() -> None:
    refused = benchmarks("cnn", "--resume")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--resume reads the file of --output, and there is none: add --output." in refused.stderr


@pytest.mark.multi_process
def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(process.WorkerError, match=r"exit status 1: [\s\S]*needs 100000 cores"):
        measure(Measurement("host_bound", "tfpar", 8, num_steps=4, num_warm_up_steps=2, cores=100_000))


@pytest.mark.multi_process
def test_a_worker_that_hangs_is_ended() -> None:
    with pytest.raises(process.WorkerError, match=r"no output within 0\.01 seconds"):
        process.ask("benchmarks.worker", {}, timeout_seconds=0.01)


@pytest.mark.multi_process
@pytest.mark.slow_start
def test_a_tiny_experiment_runs_from_end_to_end() -> None:
    one = Measurement("host_bound", "keras", 8, 4, 2, cores=1, intra_op_threads=1, inter_op_threads=1)
    two = Measurement("cnn", "tfpar", 4, 4, 2, num_replicas=2)
    settings, target = {"one": one, "two": two}, Target(("two",), ("one",), 1)
    result = harness.run_rounds(Experiment("tiny", "few steps", "examples_per_second", settings, measure, (target,)), 1)
    assert result.found(result.findings[0]) > 0


@pytest.mark.multi_process
def test_several_processes_reply_in_the_order_of_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo(tmp_path, monkeypatch, 'process.reply({"number": asked["number"]})')
    assert process.ask_all("echo", [{"number": number} for number in (3, 1, 2)]) == [
        {"number": 3},
        {"number": 1},
        {"number": 2},
    ]


@pytest.mark.multi_process
def test_of_several_processes_each_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo(tmp_path, monkeypatch, 'assert asked["number"] == 2, f"number {asked}"\nprocess.reply(asked)')
    with pytest.raises(process.WorkerError, match=r"status 1: [\s\S]*'number': 1[\s\S]*; exit status 1: [\s\S]*3"):
        process.ask_all("echo", [{"number": 1}, {"number": 2}, {"number": 3}])


def echo(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make a module `echo` that a worker process finds."""
    (folder / "echo.py").write_text(f"from benchmarks import process\nasked = process.request()\n{text}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.extended
@pytest.mark.multi_process
@pytest.mark.slow_start
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of the two workers needs a core of its own")
def test_two_workers_train_a_tiny_experiment() -> None:
    output = measure(Measurement("host_bound", "tfpar", 8, num_steps=4, num_warm_up_steps=2, num_workers=2))
    assert output["examples_per_second"] == pytest.approx(32 / output["training_seconds"])


@pytest.mark.extended
@pytest.mark.multi_process
@pytest.mark.slow_start
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of the two workers needs a core of its own")
def test_two_workers_reduce_a_tensor() -> None:
    output = all_reduce.measure(all_reduce.AllReduce("tfpar", (4096, 8192)))
    assert len(output) == 6
    assert output["8 KB_gigabytes_per_second"] == pytest.approx(8192 / output["8 KB_seconds"] / 1e9)

"""The benchmark harness: turns, medians, ratios, tables, JSON, processes; and one tiny run of the real thing."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console

from benchmarks import all_reduce, harness, parity_table, peers, process, report, restart
from benchmarks.examples import ARRAYS
from benchmarks.experiments import CNN, COMMUNICATION_BOUND, EXPERIMENTS, MIRRORED, MULTI_WORKER
from benchmarks.harness import Experiment, Measurement, Target, Timing
from benchmarks.machine import describe_machine
from benchmarks.worker import measure
from tests import ROOT

NAMES = (
    "host_bound, cnn, mirrored, multi_worker, communication_bound, checkpoint_cost, pipeline_mlp, "
    "pipeline_transformer, pipeline_memory, pipeline_prediction, pipeline_first_step, restart, parity_table"
)
OURS = Measurement("host_bound", "tfpar", batch_size=8, num_steps=100, num_warm_up_steps=2)
THEIRS = Measurement("host_bound", "keras", batch_size=8, num_steps=100, num_warm_up_steps=2)
OTHERS = Measurement("host_bound", "keras", batch_size=8, num_steps=100, num_warm_up_steps=2, steps_per_execution=4)


def experiment(figure: harness.Figure = "steps_per_second", at_least: float = 2.0) -> Experiment:
    contenders = {"tfpar": OURS, "Keras fit": THEIRS, "Keras fit, 4": OTHERS}
    return Experiment(
        "toy", "a toy", figure, contenders, (Target(("tfpar",), ("Keras fit", "Keras fit, 4"), at_least),)
    )


def measured(seconds: dict[Measurement, list[float]]) -> Callable[[Measurement], Timing]:
    """A measurement that trains for the given seconds, round by round, and then takes 9 s to return."""
    turns = {measurement: iter(values) for measurement, values in seconds.items()}
    return lambda measurement: Timing(next(turns[measurement]), 9.0)


def three_rounds(**settings: Any) -> harness.Result:
    # The machine is three times slower in the second round: 20, 20 and 40 steps a second beside 5, 5 and 4.
    seconds = {OURS: [5.0, 15.0, 2.5], THEIRS: [20.0, 60.0, 25.0], OTHERS: [40.0, 120.0, 50.0]}
    return harness.run_rounds(experiment(**settings), 3, measured(seconds))


def test_contenders_take_turns_round_by_round() -> None:
    turns: list[Measurement] = []

    def measure_one(measurement: Measurement) -> Timing:
        turns.append(measurement)
        return Timing(1.0, 0.0)

    harness.run_rounds(experiment(), 2, measure_one)
    assert turns == [OURS, THEIRS, OTHERS] * 2


def test_seconds_become_steps_or_examples_per_second() -> None:
    assert list(three_rounds().figures["tfpar"]) == pytest.approx([20.0, 100 / 15, 40.0])
    assert list(three_rounds(figure="examples_per_second").figures["tfpar"]) == pytest.approx([160.0, 800 / 15, 320.0])


def test_the_median_round_stands_for_a_contender() -> None:
    assert three_rounds().median("tfpar") == pytest.approx(20.0)


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    (outcome,) = three_rounds().outcomes()
    # Within the rounds 4, 4 and 10; the ratio of the medians would be 5.
    assert outcome.ratio == pytest.approx(4.0), "a round that was slow for both sides must not tilt the ratio"


def test_a_target_is_taken_against_the_best_of_theirs() -> None:
    (outcome,) = three_rounds().outcomes()
    assert (outcome.ours, outcome.theirs) == ("tfpar", "Keras fit")


@pytest.mark.parametrize(("at_least", "met"), [(4.0, True), (4.01, False)])
def test_a_target_is_met_from_its_ratio_on(at_least: float, met: bool) -> None:
    (outcome,) = three_rounds(at_least=at_least).outcomes()
    assert outcome.met is met


def test_no_round_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 round, received 0"):
        harness.run_rounds(experiment(), 0, measured({}))


def test_the_table_shows_medians_ratio_and_a_missed_target() -> None:
    console = rich.console.Console(width=160, file=io.StringIO())
    console.print(report.result_table(three_rounds(at_least=6.0)))
    text = console.file.getvalue()
    for part in (r"tfpar +│ +20 │ +7 │ +40", r"Keras fit +│ +4 │", r"tfpar / Keras fit: 4\.000x, target 6x MISSED"):
        assert re.search(part, text), f"no {part!r} in\n{text}"


def test_the_file_holds_machine_rounds_settings_and_ratios(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    report.write_json(path, {"cores": 2}, [three_rounds().as_json()])
    written = json.loads(path.read_text())
    (entry,) = written["experiments"]
    assert written["machine"] == {"cores": 2}
    assert entry["contenders"]["Keras fit, 4"]["measurement"]["steps_per_execution"] == 4
    assert entry["contenders"]["tfpar"]["rounds"] == pytest.approx([20.0, 100 / 15, 40.0])
    assert entry["contenders"]["tfpar"]["timings"][1] == {
        "training_seconds": 15.0,
        "return_seconds": 9.0,
        "processor_seconds": 0.0,
    }
    assert entry["targets"][0]["ratio"] == pytest.approx(4.0)
    assert entry["targets"][0]["met"] is True


@pytest.mark.parametrize("real", EXPERIMENTS, ids=lambda real: real.name)
def test_the_targets_of_an_experiment_name_its_contenders(real: Experiment) -> None:
    named = {name for target in real.targets for name in (*target.ours, *target.theirs)}
    assert named == set(real.contenders)


@pytest.mark.parametrize("target", CNN.targets[:-1], ids=lambda target: target.ours[0])
def test_both_sides_of_the_cnn_differ_in_nothing_but_the_trainer(target: Target) -> None:
    (ours,), (theirs,) = target.ours, target.theirs
    assert {**vars(CNN.contenders[ours]), "trainer": "keras"} == vars(CNN.contenders[theirs])


def test_mirrored_gives_each_replica_the_batch_of_the_single_device() -> None:
    one, two, _ = MIRRORED.contenders.values()
    assert two.batch_size == two.num_replicas * one.batch_size
    assert (one.cores, two.cores) == (1, 2)


@pytest.mark.parametrize("experiment_of_workers", [MULTI_WORKER, COMMUNICATION_BOUND], ids=lambda real: real.name)
def test_each_worker_has_one_core_and_the_batch_of_one_worker_alone(experiment_of_workers: Experiment) -> None:
    contenders = experiment_of_workers.contenders.values()
    assert {contender.batch_size / contender.num_workers for contender in contenders} == {
        experiment_of_workers.contenders["tfpar, 1 worker"].batch_size
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


def cells() -> parity_table.Table:
    def ask(module: str, request: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
        if request["trainer"] == "tfpar":
            return {"difference": 3e-16}
        if request["case"] == "hangs":
            raise process.WorkerError("no answer within 180 seconds")
        return {"difference": 0.2412} if request["case"] == "differs" else {"error": "a | b"}

    return parity_table.run_table(("differs", "fails", "hangs"), ask)


def test_the_parity_table_is_markdown() -> None:
    assert parity_table.as_markdown(cells()).splitlines() == [
        "| Case | Keras `fit`, `MirroredStrategy` | `tfpar.Mirrored` |",
        "| --- | --- | --- |",
        "| differs | differs by 2.4e-01 | equal |",
        "| fails | crashes: a \\| b | equal |",
        "| hangs | crashes: no answer within 180 seconds | equal |",
    ]


def test_the_parity_table_as_json_keeps_the_figures() -> None:
    entry = json.loads(json.dumps(parity_table.as_json(cells())))
    assert entry["cases"]["differs"]["keras"]["difference"] == 0.2412


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
def test_of_an_error_the_words_that_tell_are_kept(message: str, words: str) -> None:
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

    def ask_all(module: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"found": [{"seconds": seconds, "processor_seconds": 0.5}]} for seconds in next(rounds)]

    monkeypatch.setattr(process, "ask_all", ask_all)
    (row,) = all_reduce.run_rounds(["gather"], [4_000_000_000], 3, lambda line: None)
    assert (row["rounds"], row["seconds"], row["gigabytes_per_second"]) == ([2.0, 9.0, 4.0], 4.0, 1.0)


# The restart


def test_a_record_keeps_whole_lines_only(tmp_path: Path) -> None:
    steps = [restart.Step(7, 0, 1.25), restart.Step(8, 1, 2.5)]
    (tmp_path / "steps-1").write_text(restart.as_lines(steps) + "8 2 3.")
    assert restart.record(tmp_path, 1) == steps
    assert restart.record(tmp_path, 0) == []


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
def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(process.WorkerError, match=r"exit status 1: [\s\S]*needs 100000 cores"):
        measure(Measurement("host_bound", "tfpar", 8, num_steps=4, num_warm_up_steps=2, cores=100_000))


@pytest.mark.multi_process
def test_a_worker_that_hangs_is_ended() -> None:
    with pytest.raises(process.WorkerError, match=r"no answer within 0\.01 seconds"):
        process.ask("benchmarks.worker", {}, timeout_seconds=0.01)


@pytest.mark.multi_process
@pytest.mark.slow_start
def test_a_tiny_experiment_runs_from_end_to_end() -> None:
    one = Measurement("host_bound", "keras", 8, 4, 2, cores=1, intra_op_threads=1, inter_op_threads=1)
    two = Measurement("cnn", "tfpar", 4, 4, 2, num_replicas=2)
    tiny = Experiment(
        "tiny", "few steps", "examples_per_second", {"one": one, "two": two}, (Target(("two",), ("one",), 1),)
    )
    (outcome,) = harness.run_rounds(tiny, 1, measure).outcomes()
    assert outcome.ratio > 0


@pytest.mark.multi_process
def test_several_processes_answer_in_the_order_of_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo(tmp_path, monkeypatch, 'process.answer({"number": asked["number"]})')
    assert process.ask_all("echo", [{"number": number} for number in (3, 1, 2)]) == [
        {"number": 3},
        {"number": 1},
        {"number": 2},
    ]


@pytest.mark.multi_process
def test_of_several_processes_each_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo(tmp_path, monkeypatch, 'assert asked["number"] == 2, f"number {asked}"\nprocess.answer(asked)')
    with pytest.raises(process.WorkerError, match=r"status 1: [\s\S]*'number': 1[\s\S]*; exit status 1: [\s\S]*3"):
        process.ask_all("echo", [{"number": 1}, {"number": 2}, {"number": 3}])


def echo(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make a module `echo` that a worker process finds."""
    (folder / "echo.py").write_text(f"from benchmarks import process\nasked = process.request()\n{text}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.multi_process
@pytest.mark.slow_start
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each of the two workers needs a core of its own")
def test_two_workers_train_a_tiny_experiment() -> None:
    timing = measure(Measurement("host_bound", "tfpar", 8, num_steps=4, num_warm_up_steps=2, num_workers=2))
    assert timing.training_seconds > 0

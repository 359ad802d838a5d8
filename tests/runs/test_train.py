"""`python -m tfpar.train` for a user: its output, its files, and the same command again."""

import configparser
import importlib
import itertools
import json
import os
import pty
import re
import shlex
from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import ROOT, Outcome, contents, metrics, settings
from tfpar import config, train

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
IN_FLOAT64 = settings("training.epochs=2", "training.precision=float64")  # where rounding hides nothing
FILES = {"config.toml", "metrics.jsonl", "model.keras", "optimizer.json", "results.json"}
FILES |= {"run.json", "tensorflow.log", "report.html", "record.json", "events.jsonl"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where TensorFlow Datasets keeps the digits; the first run prepares them."""
    return tmp_path_factory.getbasetemp() / "tfds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the commands, empty at first."""
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def default_run(folder: Path, data: Path) -> Outcome:
    """The command without any flag, in an empty folder."""
    return command.run([], folder, data)


@pytest.fixture(scope="module")
def on_terminal(folder: Path, data: Path) -> Outcome:
    """Two epochs on one device, watched on a terminal."""
    master, slave = pty.openpty()
    arguments = ["--directory", "runs/terminal", *IN_FLOAT64]
    with command.started(arguments, folder, data, terminal=slave) as running:
        os.close(slave)
        written = b""
        while piece := _read(master):
            written += piece
        os.close(master)
        return Outcome(running.finish().code, written.decode(), "")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side is closed
        return b""


# The default run


@pytest.mark.slow_start
def test_the_default_run_trains_and_tensorflow_is_not_heard(default_run: Outcome) -> None:
    assert default_run.code == 0, default_run
    assert default_run.err == "", "start-up messages of TensorFlow belong into tensorflow.log"


@pytest.mark.slow_start
def test_the_plan_names_devices_strategy_and_batch_arithmetic(default_run: Outcome) -> None:
    plan = default_run.out.split("\n\n")[0]
    for part in ("runs/default", "CPU:0", "SingleDevice", "cnn", "float32", "64 examples = 1 replica x 64"):
        assert part in plan, f"{part!r} is not in\n{plan}"
    assert re.search(r"data +digits, 1,497 examples to train, validated", plan), plan
    assert re.search(r"epochs +10, of 24 steps each", plan), plan


@pytest.mark.slow_start
def test_each_epoch_is_one_line_with_one_speed(default_run: Outcome) -> None:
    header, *lines = default_run.out.split("\n\n")[1].splitlines()
    assert header.split() == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "examples/s"]
    assert [line.split()[0] for line in lines] == [f"{epoch}/10" for epoch in range(1, 11)]
    assert all(re.fullmatch(r" *\d+/10( +\d\.\d+){4} +[\d,]+", line) for line in lines), lines
    assert not re.search("[\r\b\x1b]", default_run.out), "no control characters where no terminal is"


@pytest.mark.slow_start
def test_nothing_is_wider_than_eighty_columns(default_run: Outcome, on_terminal: Outcome) -> None:
    for written in (default_run.out, on_terminal.out.replace("\r\n", "\n").replace("\r", "\n")):
        assert max(map(len, written.splitlines())) <= 80, written
    assert "every worker" not in default_run.out, "there is one"
    assert "logical CPUs" not in default_run.out


@pytest.mark.slow_start
def test_the_summary_says_metrics_speed_and_where_files_lie(default_run: Outcome) -> None:
    summary = default_run.out[default_run.out.index("trained    10 epochs, 240 steps") :]
    assert re.search(r"^accuracy   0\.\d{4}, in validation 0\.9\d{3}$", summary, re.MULTILINE), summary
    assert re.search(r"^speed      [\d,]+ examples/s, [\d.]+ ms a step, \d+ % of it waiting for data$", summary, re.M)
    for part in ("model.keras", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert f"runs/default/{part}" in summary, f"{part!r} is not in\n{summary}"


@pytest.mark.slow_start
def test_the_run_directory_holds_all_that_is_promised(default_run: Outcome, folder: Path) -> None:
    directory = folder / "runs" / "default"
    assert [path.name for path in folder.iterdir()] == ["runs"], "nothing else in the current folder"
    assert {path.name for path in directory.iterdir() if path.is_file()} - {".lock"} == FILES
    assert config.load(directory / "config.toml") == config.Run()
    assert list((directory / "checkpoints").glob("*.npz"))
    assert list((directory / "tensorboard").rglob("events.out.tfevents.*"))
    assert "TensorFlow" in (directory / "tensorflow.log").read_text(), "its messages are kept"


@pytest.mark.slow_start
def test_metrics_and_results_tell_of_a_good_model(default_run: Outcome, folder: Path) -> None:
    directory = folder / "runs" / "default"
    lines = metrics(directory)
    assert [(line["epoch"], line["step"]) for line in lines] == [(epoch, 24 * epoch) for epoch in range(1, 11)]
    assert lines[-1]["val_accuracy"] > 0.95
    results = json.loads((directory / "results.json").read_text())
    for name, value in lines[-1].items():
        if name not in ("epoch", "step"):
            assert results[name] == pytest.approx(value, rel=1e-5), f"{name}: the saved model is the last epoch's"


@pytest.mark.slow_start
@pytest.mark.usefixtures("logical_cpus", "default_run")
def test_the_same_command_again_says_that_it_is_trained_and_changes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder, without=[".lock", "tensorflow.log"])
    again = command.InProcess(capfd, monkeypatch, folder)()
    assert again.code == 0
    assert "trained to its end already" in again.out
    assert ", in validation 0.9" in again.out, "the results are shown again"
    assert again.err == ""
    assert contents(folder, without=[".lock", "tensorflow.log"]) == before


# A terminal, and two replicas


@pytest.mark.slow_start
def test_a_terminal_sees_a_progress_bar(on_terminal: Outcome) -> None:
    assert on_terminal.code == 0, on_terminal.out
    assert "━" in on_terminal.out
    assert re.search(r"[\r\b].*\b1/24\b.*[\r\b].*24/24", on_terminal.out, re.DOTALL), "it moves"
    assert "oneDNN" not in on_terminal.out, "TensorFlow's messages"
    assert "CUDA" not in on_terminal.out, "TensorFlow's messages"


@pytest.mark.extended
def test_all_that_a_run_can_ask_of_the_loop_is_alike_on_three_replicas(
    logical_cpus: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = command.InProcess(capfd, monkeypatch, tmp_path)
    config_file = str(ROOT / "configs" / "regression_small.toml")
    asked = [
        *("data.num_examples=2000", "training.global_batch_size=64", "training.epochs=4", "training.precision=float64"),
        *("training.gradient_accumulation_steps=2", "training.global_clipnorm=0.5", "training.ema_momentum=0.9"),
        *("optimizer.warmup_steps=40", "optimizer.base_batch_size=32", "optimizer.settings.momentum=0.5"),
        *("callbacks.reduce_learning_rate_patience=1", "callbacks.early_stopping_patience=3"),
        *("model.l1=1e-3", "model.l2=1e-3", "training.validation_freq=1"),
    ]
    one = call("--config", config_file, "--directory", "one", *settings(*asked, "strategy.kind=single_device"))
    assert one.code == 0, one
    three = ["strategy.kind=mirrored", 'strategy.devices=["CPU:0", "CPU:1", "CPU:2"]']
    three.append(f"strategy.num_logical_cpus={len(logical_cpus)}")
    three.append("callbacks.check_replicas_every_steps=5")
    mirrored = call("--config", config_file, "--directory", "three", *settings(*asked, *three))
    assert mirrored.code == 0, mirrored
    assert "64 examples = 3 replicas x 21 to 22" in mirrored.out
    for line, expected in zip(metrics(tmp_path / "three"), metrics(tmp_path / "one"), strict=True):
        assert line == pytest.approx(expected, rel=1e-9)
    command.assert_same_weights(tmp_path / "three", tmp_path / "one", tolerance=1e-9)


# Flags


def test_print_config_prints_the_run_and_does_not_start_tensorflow(tmp_path: Path) -> None:
    overrides = ["training.epochs=3", "model.name=linear", "training.epochs=4"]
    flags = ["--config", str(ROOT / "configs" / "regression_small.toml"), "--print_config", *settings(*overrides)]
    printed = command.run(flags, tmp_path, tmp_path, code=["-X", "importtime", "-m", "tfpar.train"])
    assert printed.code == 0, printed
    imported = re.findall(r"\| +(\w+)[.\n]", printed.err)
    assert "pydantic" in imported, "this test reads the list of imports rightly"
    assert not {"tensorflow", "keras", "numpy", "tensorflow_datasets"} & set(imported)
    (tmp_path / "printed.toml").write_text(printed.out)
    assert config.load(tmp_path / "printed.toml") == config.load(ROOT / "configs" / "regression_small.toml", overrides)
    assert [path.name for path in tmp_path.iterdir()] == ["printed.toml"], "no run directory is made"


@pytest.mark.usefixtures("logical_cpus")
def test_the_audit_says_how_the_workers_share_the_examples(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    call = command.InProcess(capfd, monkeypatch, tmp_path)
    flags = ["--config", str(ROOT / "configs" / "regression_small.toml"), *settings("data.num_examples=64")]
    printed = call(*flags, "--audit", "2").out
    assert printed.startswith("sharding   by batch, because ")
    assert len(printed.partition("\n\n")[0].splitlines()) > 1, "lines of at most 80 columns"


@pytest.mark.usefixtures("logical_cpus")
def test_a_run_is_named_after_its_config_unless_a_directory_is_given(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = command.InProcess(capfd, monkeypatch, tmp_path)
    flags = ["--config", str(ROOT / "configs" / "regression_small.toml"), *settings("data.num_examples=2048")]
    for more, expected in (([], "runs/regression_small"), (["--directory", "deep/er/x"], "deep/er/x")):
        outcome = call(*flags, *more)
        assert outcome.code == 0, outcome
        assert config.load(tmp_path / expected / "config.toml").data.num_examples == 2048
        assert (tmp_path / expected / "model.keras").exists()


def test_the_console_script_is_the_command() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = dict(line.split(" = ") for line in setup["options.entry_points"]["console_scripts"].split("\n") if line)
    module, _, function = scripts["tfpar-train"].partition(":")
    assert getattr(importlib.import_module(module), function) is train.run


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_command_in_a_configs_header_is_one_that_runs_it(path: Path, tmp_path: Path) -> None:
    header = dict(re.findall(r"^# (Command|Hardware|Time|Result): (.+)$", path.read_text(), re.MULTILINE))
    assert header.keys() == {"Command", "Hardware", "Time", "Result"}
    words = shlex.split(header["Command"])
    if words[2] == "tfpar.launch":  # what follows -- are the train command's
        words = ["python", "-m", "tfpar.train", *words[words.index("--") + 1 :]]
    assert words[:5] == ["python", "-m", "tfpar.train", "--config", f"configs/{path.name}"]
    overrides = [value for flag, value in itertools.pairwise(words[5:]) if flag == "--set"]
    config.load(ROOT / words[4], overrides)
    assert set(words[5:]) <= {"--set", "--trace", *overrides}
    for key in ("Time", "Result"):
        assert "to be measured" not in header[key], f"{key} is to be measured, and then to stand there"

"""The help and the version of the commands, and their errors for unknown flags."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl.testing import flagsaver

import tfpar
from tests import ROOT
from tfpar import __main__, launch, report, train
from tfpar.commands import command_line
from tfpar.config import bundled_configurations

# `tfpar.plan` and `tfpar.doctor` are functions.
CALLABLE = {name: importlib.import_module(name) for name in ("tfpar.plan", "tfpar.doctor")}
COMMANDS = {"tfpar.train": train, "tfpar.launch": launch, "tfpar.report": report, **CALLABLE}


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python on a terminal of 80 columns, without TensorFlow and what only training needs."""
    (folder / "tensorflow.py").write_text("raise ImportError('TensorFlow must not start')")
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.crossed
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_explains_the_command_within_80_columns(command: str, flag: str, tmp_path: Path) -> None:
    helped = run(command, flag, folder=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert " ".join(helped.stdout.split()).startswith(command_line.COMMANDS[command])
    assert f"usage: python -m {command}" in helped.stdout
    assert f"examples:\n  python -m {command}" in helped.stdout
    assert "repeat this option" not in helped.stdout, "absl's own words"
    assert max(map(len, helped.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_has_every_flag_of_the_command(command: object) -> None:
    values = command.COMMAND.values
    defined = {flag.name for flag in values.get_flags_for_module(command)}
    assert defined == set(command.COMMAND.flags)
    shown = command_line.help_text(command.COMMAND)
    for name in defined:
        assert f"--{name}" in shown
        assert " ".join(values[name].help.partition(";\n")[0].split()) in " ".join(shown.split())


def test_help_lists_the_configurations_and_points_to_all_settings() -> None:
    shown = " ".join(command_line.help_text(train.COMMAND).split())
    for name in bundled_configurations.names():
        assert f" {name} {bundled_configurations.describe(name)}" in shown
    assert "--config digits --print_config" in shown


@pytest.mark.parametrize(
    ("value", "code", "said"), [("", 0, ""), ("3", 3, ""), ("'Download the data.'", 1, "Download the data.\n")]
)
def test_a_command_that_calls_sys_exit_ends_as_a_script_does(value: str, code: int, said: str, tmp_path: Path) -> None:
    text = f"import sys; from tfpar.commands import command_line; command_line.run_plain(lambda: sys.exit({value}))"
    (tmp_path / "script.py").write_text(text)
    ended = run("script", folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", said)


@pytest.mark.parametrize(("command", "code"), [("plan", 2), ("doctor", 2), ("train", 1)])
def test_a_bug_prints_a_traceback_and_has_the_code_of_an_error(command: str, code: int, tmp_path: Path) -> None:
    text = f"import tfpar.{command}; tfpar.{command}.main = lambda argv: 1 // 0; tfpar.{command}.run()"
    (tmp_path / "script.py").write_text(text)
    ended = run("script", folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("Traceback ")
    assert ended.stderr.splitlines()[-1].startswith("ZeroDivisionError: ")


@pytest.mark.parametrize("command", ["tfpar", *COMMANDS])
def test_version_lists_tfpar_tensorflow_keras_and_python(command: str, tmp_path: Path) -> None:
    asked = run(command, "--version", folder=tmp_path)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"tfpar {tfpar.__version__} (TensorFlow 2.")


def test_python_dash_m_tfpar_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"python -m {name} " in shown
        assert (ROOT / f"{name.replace('.', '/')}.py").exists()
    assert __main__.main(["trian", "--config", "digits"]) == 1
    assert capsys.readouterr().err.endswith("received 'trian'. Write python -m tfpar.train.\n")


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("tfpar.train", ["--confg", "digits"], "--confg is no flag. Did you mean --config? See"),
        ("tfpar.train", ["--zzz"], "--zzz is no flag. See python -m tfpar.train --help."),
        ("tfpar.train", ["--epochs", "3"], "--epochs is no flag. A setting is changed with --set: did you mean --set "),
        ("tfpar.train", ["--lr=3"], "did you mean --set optimizer.learning_rate=...?"),
        ("tfpar.train", ["--config"], "--config needs a value."),
        ("tfpar.train", ["--audit", "two"], "--audit must be an integer, received 'two'."),
        ("tfpar.train", ["--trace=maybe"], "--trace must be true or false, received 'maybe'."),
        ("tfpar.launch", ["--workers", "2"], "--workers is no flag. Did you mean --num_workers?"),
        ("tfpar.launch", ["--epochs", "3"], "--epochs is no flag. The command of the workers follows after --, as in"),
        (
            "tfpar.launch",
            ["--num_workers", "2", "script.py"],
            "'script.py' is no flag, and the command of the workers follows after --. "
            "Write python -m tfpar.launch --num_workers 2 -- script.py.\n",
        ),
        ("tfpar.launch", ["--num_workers", "two"], "--num_workers must be an integer, received 'two'."),
    ],
)
def test_a_wrong_flag_is_one_sentence_with_the_way_out(
    command: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = launch._parse if command == "tfpar.launch" else lambda words: command_line.parse(train.COMMAND, words)
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
        parse([command, *arguments])
    assert left.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits"], "received 'digits'. Did you mean --config digits?"),
        (["training.epochs=3"], "received 'training.epochs=3'. Did you mean --set training.epochs=3?"),
        (["--config", "digit"], "There is no configuration 'digit'. Did you mean digits?"),
        (["--set", "training.lr=3"], "did you mean optimizer.learning_rate?"),
    ],
)
def test_a_misplaced_word_is_one_sentence_and_never_absls_own_words(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    refused = run("tfpar.train", *arguments, folder=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1

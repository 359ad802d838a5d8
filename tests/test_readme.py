"""Documentation that is run: every command and every example of the README and CONTRIBUTING."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfpar import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INSTALL = "sh install.sh"
DEFAULT = ".venv/bin/python -m tfpar.train"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


def run_commands() -> list[str]:
    """The train and launch commands of the README, without the installation in front of them."""
    parts = [part.strip() for command in commands(README) for part in command.split("&&")]
    return [part for part in parts if "-m tfpar." in part]


def test_ci_runs_exactly_the_second_command() -> None:
    assert commands(README)[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_first_command_installs_as_the_second_does() -> None:
    first, second = commands(README)[:2]
    assert first.split(" && ")[0] == INSTALL
    assert second.split(" && ")[0] == f"{INSTALL} test"


def test_the_shortest_command_is_the_one_that_test_train_runs_in_an_empty_folder() -> None:
    assert DEFAULT in run_commands()


@pytest.mark.slow_start
@pytest.mark.parametrize("command", [command for command in run_commands() if command != DEFAULT])
def test_the_commands_of_the_readme_end_well(command: str, tmp_path: Path) -> None:
    # The command as it stands, but in a folder of its own and with the Python that runs the tests.
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("script.py", "my_trainer.py"):
        (tmp_path / name).write_text(next(block for block in blocks(README, "python") if f"# {name}" in block))
    arguments = [sys.executable if part == ".venv/bin/python" else part for part in shlex.split(command)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_CPP")}
    environment["PYTHONPATH"] = str(ROOT)
    completed = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    if not any(words in command for words in ("--print", "--audit", "script.py")):
        assert list(tmp_path.glob("runs/*/model.keras")), completed.stdout
    if "--trace" in command:
        assert "predicted  step" in completed.stdout
        assert "64 examples = 8 micro-batches x 8" in completed.stdout
        assert max(map(len, completed.stdout.splitlines())) <= 80, completed.stdout
        assert (tmp_path / "runs/pipeline/pipeline.png").stat().st_size > 10_000
        assert list(tmp_path.glob("runs/pipeline/tensorboard/pipeline/*")), "no image for TensorBoard"
    if "script.py" in command:
        assert list(tmp_path.glob("checkpoints/*.npz")), completed.stdout


def test_the_library_examples_of_the_readme_run(
    logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tensorflow as tf

    rng = np.random.default_rng(0)
    images = rng.uniform(size=(200, 8, 8, 1)).astype("float32")
    labels = rng.integers(0, 10, size=200)
    names = {"images": images, "labels": labels}
    names["dataset"] = tf.data.Dataset.from_tensor_slices((images, labels)).batch(30)
    monkeypatch.chdir(tmp_path)
    # The session has four logical CPUs already.
    for block in blocks(README, "python"):
        if "MultiWorker" in block:
            continue  # a program of its own, which a command of the README starts
        exec(block.replace("tfpar.use_logical_cpus(2)", "tfpar.use_logical_cpus(4)"), names)
    assert (tmp_path / "model.keras").exists()
    assert "equal to one device" in " ".join(capsys.readouterr().out.split())


def test_every_name_of_tfpar_in_the_readme_exists() -> None:
    import tfpar

    for name in re.findall(r"`tfpar\.([A-Za-z_]+)", README):
        assert name in tfpar.__all__ or list((ROOT / "tfpar").glob(f"{name}*")) or name == "_compat", name


def test_every_file_in_the_documents_exists() -> None:
    pattern = r"`((?:tests|configs|trainers|tfpar|benchmarks)/[\w./]*)`"
    for document in ("README.md", "CONTRIBUTING.md"):
        for name in re.findall(pattern, (ROOT / document).read_text()):
            assert (ROOT / name).exists(), f"{document} names {name}"


def test_the_pytest_commands_of_contributing_select_tests() -> None:
    selecting = [command for command in commands((ROOT / "CONTRIBUTING.md").read_text()) if "pytest" in command]
    assert len(selecting) >= 3
    asked = [[*shlex.split(command)[3:], "--collect-only", "-q"] for command in selecting]
    # One process for all: each would import TensorFlow anew.
    program = f"import pytest, sys; sys.exit(max(pytest.main(arguments) for arguments in {asked!r}))"
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("tests collected") == len(selecting), completed.stdout


def test_the_configurations_named_in_the_readme_load() -> None:
    for name in re.findall(r"configs/\w+\.toml", README):
        assert config.load(ROOT / name)

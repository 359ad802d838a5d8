"""Every train and launch command of the README and of docs/, each in a separate folder.

CI runs one of each kind; the others differ in a configuration that other tests train.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.documents import DEFAULT, ROOT, files, run_commands
from tests.support.extent import sampled

FOR_CLUSTERS = [command for command in run_commands() if " --print " in command]
COMMANDS = [command for command in run_commands() if command not in (DEFAULT, *FOR_CLUSTERS)]
# Those of CI, by their parts.
PARTS = ("--audit", "--trace", "script.py", "--print_config")
OF_CI = [command for command in COMMANDS if any(part in command for part in PARTS)]
# A user's model function and dataset, which commands name as train.py:build_model and train.py:dataset.
USERS_MODEL = "from tests.support.docstrings import _dataset as dataset, build_model\n"


def run_in(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run the unchanged command, but in a separate folder and with the Python that runs the tests."""
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, text in files().items():
        (folder / name).write_text(text)
    (folder / "train.py").write_text(USERS_MODEL)
    names = (".venv/bin/python", "python")
    arguments = [sys.executable if part in names else part for part in shlex.split(command)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_CPP")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow_start
@pytest.mark.parametrize("command", FOR_CLUSTERS)
def test_the_commands_for_clusters_print_a_script_or_a_manifest(command: str, tmp_path: Path) -> None:
    completed = run_in(tmp_path, command)
    assert (completed.returncode, completed.stderr) == (0, "")
    if "--print slurm" in command:
        assert completed.stdout.startswith("#!/bin/bash\n")
        return
    kinds = [document["kind"] for document in yaml.safe_load_all(completed.stdout) if document]
    assert shlex.split(command.partition("--print ")[2])[0] == kinds[-1].lower()


@pytest.mark.few(2)
@pytest.mark.multi_process
@pytest.mark.slow_start
@pytest.mark.parametrize("command", sampled(COMMANDS, OF_CI))
def test_the_commands_of_the_documents_end_without_error(command: str, tmp_path: Path) -> None:
    completed = run_in(tmp_path, command)
    is_doctor = "tfpar.doctor" in command
    is_plan = "tfpar.plan" in command
    # Other tests run at the same time: the doctor may find the machine slow (1), but nothing wrong (2).
    assert completed.returncode in ((0, 1) if is_doctor else (0,)), completed.stdout + completed.stderr
    assert completed.stderr == ""
    if not is_doctor and not is_plan and not any(words in command for words in ("--print_config", "--audit", ".py")):
        assert list(tmp_path.glob("runs/*/model.keras")), completed.stdout
    if "--trace" in command:
        assert "predicted  step" in completed.stdout
        assert "64 examples = 8 micro-batches x 8" in completed.stdout
        assert max(map(len, completed.stdout.splitlines())) <= 80, completed.stdout
        assert (tmp_path / "runs/pipeline/pipeline.png").stat().st_size > 10_000
        assert list(tmp_path.glob("runs/pipeline/tensorboard/pipeline/*")), "no image for TensorBoard"
    if "script.py" in command:
        assert list(tmp_path.glob("checkpoints/*.npz")), completed.stdout

"""Every script and notebook of `examples/` runs as its docstring says, and prints what that says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.command import InProcess
from tests.support.extent import sampled

EXAMPLES = ROOT / "examples"
MAX_LINES = 80
ROUNDING = 1e-5  # of float32
ALL_IN_ONE_PROCESS = ("mirrored", "pipeline", "keras_hub_fine_tune", "single_device")  # the last asks for no devices
IN_ONE_PROCESS = sampled(ALL_IN_ONE_PROCESS, of_ci=("mirrored", "pipeline", "single_device"))
# Each starts as if it were alone: the devices of the process are the two that it asks for.
RUNS_ALL = """
import importlib.util, runpy, sys
for path in sys.argv[1:]:
    if "keras_hub" in path and not importlib.util.find_spec("keras_hub"):
        continue
    print("script", path, flush=True)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


def environment() -> Mapping[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    return {**variables, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "-1"}


def run(arguments: list[str], folder: Path) -> str:
    completed = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def differences(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"largest relative difference of a weight: (\S+)", text)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script of one process printed; one process for all, as TensorFlow's start takes longest."""
    paths = [str(EXAMPLES / f"{name}.py") for name in IN_ONE_PROCESS]
    _, *parts = run(["-c", RUNS_ALL, *paths], tmp_path_factory.mktemp("examples")).split("script ")
    return {Path(path).stem: text for path, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.slow_start
def test_the_drop_in_prints_the_same_as_keras(printed: dict[str, str]) -> None:
    of_keras, of_tfpar = re.findall(r"^(?:keras|tfpar): (.*)$", printed["single_device"], re.MULTILINE)
    assert of_tfpar == of_keras
    (difference,) = differences(printed["single_device"])
    assert difference <= ROUNDING


@pytest.mark.slow_start
def test_replicas_are_equal_to_one_device(printed: dict[str, str]) -> None:
    assert "Mirrored over 2 replicas" in printed["mirrored"]
    assert "equal to one device" in " ".join(printed["mirrored"].split())
    assert re.search(r"held out: loss \d\.\d+, accuracy 0\.\d+", printed["mirrored"])


@pytest.mark.slow_start
def test_a_pipeline_prints_its_stages_and_the_loss_of_one_device(printed: dict[str, str]) -> None:
    text = printed["pipeline"]
    assert "2 stages on 2 devices, 4 micro-batches" in text
    assert "predicted  step" in text
    of_pipeline, of_one_device = re.findall(r"^(?:pipeline|one device): (.*)$", text, re.MULTILINE)
    assert of_pipeline == of_one_device
    (difference,) = differences(text)
    assert difference <= ROUNDING


@pytest.mark.extended
@pytest.mark.slow_start
def test_a_model_of_keras_hub_is_fine_tuned_in_two_phases(printed: dict[str, str]) -> None:
    pytest.importorskip("keras_hub")
    phases = re.findall(
        r"^([\w ]+): ([\d,]+) parameters, loss ([\d.]+) before, ([\d.]+) after", printed["keras_hub_fine_tune"], re.M
    )
    (head, num_head, first, second), (rest, num_all, third, fourth) = phases
    assert (head, rest) == ("head", "all layers")
    assert int(num_head.replace(",", "")) < int(num_all.replace(",", ""))
    assert float(first) > float(second) == float(third) > float(fourth)


@pytest.mark.extended
@pytest.mark.multi_process
def test_workers_print_the_loss_of_one_device(tmp_path: Path) -> None:
    script = str(EXAMPLES / "multi_worker.py")
    text = run(["-m", "tfpar.launch", "--num_workers", "2", "--", script, "--epochs", "1"], tmp_path)
    assert re.search(r"^\[0\] 2 workers: loss \d\.\d+, accuracy 0\.\d+$", text, re.MULTILINE), text
    (difference,) = differences(text)
    assert difference <= ROUNDING


@pytest.mark.few(1)
@pytest.mark.parametrize(("part", "folder"), [("", "perceptron"), ("pipeline", "perceptron_in_stages")])
def test_the_trainer_of_ones_own_reports_the_worst_digit(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    logical_cpus: list[str],
    part: str,
    folder: str,
) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    documented = re.findall(r"`python -m tfpar.train ([^`]*)`", (EXAMPLES / "own_trainer.py").read_text())
    words = next(command for command in documented if part in command).split()
    asked_for = "strategy.num_logical_cpus=2"  # the tests share four
    words = [word if word != asked_for else f"strategy.num_logical_cpus={len(logical_cpus)}" for word in words]
    outcome = InProcess(capfd, monkeypatch, tmp_path)(
        *words, "--set", "training.epochs=1", "--set", "options.hidden=16"
    )
    assert outcome.code == 0, outcome.err
    assert re.search(r"recognized worst: \d, in \d+% of \d+ images", outcome.out), outcome.out
    assert (tmp_path / "runs" / folder / "model.keras").exists()


@pytest.mark.extended
@pytest.mark.slow_start
def test_the_notebook_shows_the_stages_as_text_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / "preview.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    (shown,) = [output.data for output in outputs if "image/png" in output.get("data", {})]
    assert "2 stages on 2 devices, 4 micro-batches" in shown["text/plain"]
    assert '<img alt="schedule"' in shown["text/html"]
    streamed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert len(re.findall(r"^\d micro-batches: step [\d.]+ ms, bubble \d+%$", streamed, re.MULTILINE)) == 3
    assert re.search(r"^loss \d\.\d+, accuracy 0\.\d+$", streamed, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_is_short_says_how_to_start_it_and_is_listed(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "Start it" in docstring
    assert "rints" in docstring
    assert path.name in (EXAMPLES / "README.md").read_text()

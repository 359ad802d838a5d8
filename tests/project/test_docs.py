"""Documentation that is run: every example, diff and configuration of the README and of docs/."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.documents import (
    DEFAULT,
    DOCUMENTS,
    INSTALL,
    LANGUAGES,
    NOT_RUN,
    ROOT,
    blocks,
    commands,
    files,
    run_commands,
)
from tfpar import config

ONE_FILE = "tests/properties/test_parity.py"
COLLECT = ("--collect-only", "-q")


def test_ci_runs_the_second_command_within_a_time_limit() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    install, tests = commands(ROOT / "README.md")[1].split(" && ")
    assert install in lines
    assert any(line.startswith("timeout ") and f" {tests} " in line for line in lines)


def test_the_first_command_installs_as_the_second_does() -> None:
    first, second = commands(ROOT / "README.md")[:2]
    assert first.split(" && ")[0] == INSTALL
    assert second.split(" && ")[0] == f"{INSTALL} test"


def test_the_readme_is_short_and_its_figures_are_those_of_the_benchmarks() -> None:
    readme, benchmarks = ((ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md"))
    assert len(readme.splitlines()) <= 150
    figures = readme.partition("## Figures")[2].partition("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in figures.splitlines() if row.startswith("| `")]
    assert len(rows) == 7, "a header and six rows"
    for _, value, *_ in rows[1:]:
        assert f"| {value} |" in benchmarks


def test_every_block_of_the_documents_is_of_a_language_that_is_tested() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```(.*)", document.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= LANGUAGES, document


def test_the_page_of_settings_and_flags_is_that_of_the_code() -> None:
    specification = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert specification is not None
    assert specification.loader is not None
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    page = (ROOT / "docs" / "settings.md").read_text()
    assert hooks.with_tables(page) == page, "run python docs/hooks.py"


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    for word in NOT_RUN:
        assert any(word in command for command in commands(*DOCUMENTS)), word


def test_the_shortest_command_is_the_one_that_test_train_runs_in_an_empty_folder() -> None:
    assert DEFAULT in run_commands()


def adapted(block: str) -> str:
    """Return an example for this process, whose CPU is split in four already, on the two devices that it speaks of."""
    block = block.replace("tfpar.use_logical_cpus(2)", "tfpar.use_logical_cpus(4)")
    return block.replace("tfpar.Mirrored()", 'tfpar.Mirrored(["CPU:0", "CPU:1"])')


def written_as_records(folder: Path, images: Any, labels: Any) -> Callable[[Any], Any]:
    """Write digits into two TFRecord files; return the function that reads a record."""
    import tensorflow as tf

    for number in range(2):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as file:
            for image, label in zip(images[:64], labels, strict=False):
                file.write(np.append(image, label).astype("float32").tobytes())

    def parse(record: Any) -> Any:
        row = tf.io.decode_raw(record, tf.float32)
        return tf.reshape(row[:64], [8, 8]), tf.cast(row[64], tf.int64)

    return parse


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if set(blocks(document, "python")) - set(files().values())],
    ids=lambda document: document.stem,
)
def test_the_examples_of_a_document_run(
    document: Path,
    logical_cpus: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import tensorflow as tf

    names: dict[str, object] = {}
    # The model and the data of the tutorial, as the guides say.
    exec(adapted(blocks(ROOT / "docs" / "tutorial.md", "python")[0]), names)
    names["dataset"] = tf.data.Dataset.from_tensor_slices((names["images"], names["labels"])).take(256).batch(30)
    names |= {"tf": tf, "folder": tmp_path, "parse": written_as_records(tmp_path, names["images"], names["labels"])}
    monkeypatch.chdir(tmp_path)
    for block in blocks(document, "python"):
        if block not in files().values():  # a separate program, which a command starts
            exec(adapted(block), names)
    if document.name == "README.md":
        assert (tmp_path / "model.keras").exists()
    if any("check_parity" in block for block in blocks(document, "python")):
        assert "equal to one device" in " ".join(capsys.readouterr().out.split())


def sides(diff: str) -> tuple[str, str]:
    """Return the program before a diff and the one after it."""
    before = [line[1:] for line in diff.splitlines() if not line.startswith("+")]
    return "\n".join(before), "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


def test_both_sides_of_the_diff_from_keras_train_the_same_weights(
    logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (diff,) = blocks(ROOT / "docs" / "migration" / "keras_fit.md", "diff")
    weights, names = [], [dict[str, Any](), dict[str, Any]()]
    for program, names_of_program in zip(sides(diff), names, strict=True):
        exec(adapted(program), names_of_program)
        weights.append(names_of_program["keras"].models.load_model("model.keras").get_weights())
    for one_device, two_devices in zip(*weights, strict=True):
        np.testing.assert_allclose(two_devices, one_device, rtol=1e-5, atol=1e-6)
    one_device, two_devices = (names_of_program["history"].history for names_of_program in names)
    assert {key: pytest.approx(values, rel=1e-5) for key, values in one_device.items()} == two_devices


def test_a_step_of_keras_and_its_objectives_train_alike_on_one_device(
    logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = {"d_loss", "g_loss"}
    (diff,) = blocks(ROOT / "docs" / "guides" / "objectives.md", "diff")
    names: list[dict[str, Any]] = [{}, {}]
    for program, names_of_program in zip(sides(diff), names, strict=True):
        exec(program.replace("tfpar.Mirrored()", "tfpar.SingleDevice()"), names_of_program)
    expected, history = (names_of_program["history"].history for names_of_program in names)
    assert logs <= set(expected)
    assert {key: pytest.approx(expected[key], rel=1e-5) for key in logs} == {key: history[key] for key in logs}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("document", "diff"),
    [
        pytest.param(document, diff, id=f"{document.stem}-{number}")
        for document in DOCUMENTS
        for number, diff in enumerate(blocks(document, "diff"))
        if document.stem != "keras_fit"
    ],
)
def test_the_result_of_a_diff_runs(
    document: Path, diff: str, logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = sides(diff)
    ast.parse(before)  # its libraries are not installed, as the pages say
    # A process forms a cluster before TensorFlow starts, or not at all; a command runs a program with MultiWorker.
    exec(adapted(after).replace("tfpar.MultiWorker()", 'tfpar.Mirrored(["CPU:0", "CPU:1"])'), {})
    assert list(tmp_path.iterdir()) or "save" not in after


@pytest.mark.parametrize("name", sorted(files()))
def test_each_program_of_the_documents_is_started_by_a_command(name: str) -> None:
    assert any(name in command or f"{Path(name).stem}." in command for command in run_commands())


def test_the_configurations_in_the_documents_load(tmp_path: Path) -> None:
    for document in DOCUMENTS:
        for block in blocks(document, "toml"):
            (tmp_path / "run.toml").write_text(block)
            assert config.load(tmp_path / "run.toml"), document


def test_every_name_of_tfpar_in_the_documents_exists() -> None:
    import tfpar

    for document in DOCUMENTS:
        for name in re.findall(r"`tfpar\.([A-Za-z_]+)", document.read_text()):
            modules = list((ROOT / "tfpar").glob(f"{name}*"))
            assert name in tfpar.__all__ or modules, f"{document.name} names tfpar.{name}"


def test_every_file_in_the_documents_exists() -> None:
    pattern = r"`((?:tests|configs|examples|tfpar|benchmarks|docs)/[\w./]*)`"
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(pattern, document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


@pytest.mark.extended
def test_the_pytest_commands_of_contributing_select_tests() -> None:
    selecting = [command for command in commands(ROOT / "CONTRIBUTING.md") if "pytest" in command]
    assert len(selecting) >= 3
    arguments = [shlex.split(command)[3:] for command in selecting]
    # What selects some tests of one file selects some of all files, and collecting these takes long.
    asked = [[*(part if any("tests/" in word for word in part) else [*part, ONE_FILE]), *COLLECT] for part in arguments]
    # One process for all: each would import TensorFlow again.
    program = f"import pytest, sys; sys.exit(max(pytest.main(arguments) for arguments in {asked!r}))"
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("tests collected") == len(selecting), completed.stdout


def test_the_configurations_named_in_the_documents_load() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"configs/\w+\.toml", document.read_text()):
            assert config.load(ROOT / name)


# The glossary: every word once, with a definition and the words that it replaces


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^### (.+)\n\n((?:(?!#).*\n)+)", GLOSSARY, re.MULTILINE)
PROMISED = """stage, micro-batch, partition, balance, schedule, action, saved tensors, recomputation, all-reduce,
broadcast, rendezvous, barrier, rank, chief, worker, replica, shard, checkpoint, position, run, step, epoch, strategy,
trainer"""


def test_every_word_has_one_entry_of_a_few_sentences() -> None:
    words = [word for word, _ in ENTRIES]
    assert words == re.findall(r"^### (.+)", GLOSSARY, re.MULTILINE)
    assert len(words) == len(set(words))
    assert set(re.split(r",\s+", PROMISED)) <= set(words)
    for word, text in ENTRIES:
        assert 20 < len(text.split("\n\nNot:")[0]) < 400, word


def test_no_entry_forbids_its_own_word() -> None:
    for word, text in ENTRIES:
        _, _, forbidden = text.partition("\n\nNot: ")
        assert word not in re.split(r", |\. ", forbidden.strip().split(". ")[0].rstrip(".")), word

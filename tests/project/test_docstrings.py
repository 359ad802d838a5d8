"""Every example in every docstring runs, and every public name has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfpar
from tests.support import docstrings
from tests.support.docstrings import ROOT

FOUND = list(docstrings.collect())
HERE = [one for one in FOUND if one.name not in (*docstrings.IN_A_JOB, *docstrings.IN_A_PROCESS)]
MODULES = sorted({one.module for one in HERE})
DOCTOR = "tfpar.checks.doctor"  # tests/checks/test_doctor.py examines this machine


@pytest.mark.few(40)
@pytest.mark.parametrize(
    "module", [pytest.param(one, marks=[pytest.mark.extended] * (one == DOCTOR)) for one in MODULES]
)
def test_examples_in_docstrings_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    problems = [docstrings.run(one) for one in HERE if one.module == module]
    assert not any(problems), "\n".join(problems)


@pytest.mark.slow_start
def test_examples_that_come_before_tensorflow_starts_run_in_a_new_process() -> None:
    program = """
from tests.support import docstrings
for one in docstrings.called(*docstrings.IN_A_PROCESS):
    print(docstrings.run(one), end="")
"""
    completed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.stdout, completed.returncode) == ("", 0), completed.stdout + completed.stderr


def test_no_example_is_skipped() -> None:
    skipped = [f"{one.module}.{one.name}" for one in FOUND if "doctest: +SKIP" in one.text]
    assert not skipped


def test_every_public_name_has_an_example() -> None:
    described = {one.name for one in FOUND}
    missing = [name for name in tfpar.__all__ if name not in described]
    assert not missing, f"{missing} have no example in their docstrings"

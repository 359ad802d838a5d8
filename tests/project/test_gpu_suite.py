"""The tests for GPUs: skipped without one, and some of them on logical CPUs, so that they stay as they should be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = [pytest.mark.multi_process, pytest.mark.slow_start]
# One test of each kind.
SAMPLE = (
    "(test_gpu_training and mirrored and finite) or (resumes and pipeline)"
    " or (test_gpu_parity and (in_the_table or table_has or (masked and mirrored))) or free_memory"
    " or (test_gpu_divisions and float16 and stages)"
)


def gpu_tests(*arguments: str) -> str:
    """Run the tests for GPUs where no GPU is visible; return the last line."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    return ended.stdout.splitlines()[-1]


@pytest.mark.extended
def test_without_a_gpu_every_test_is_skipped() -> None:
    words = gpu_tests().split()
    assert words[1] == "skipped"
    assert int(words[0]) > 100


@pytest.mark.extended
def test_a_sample_passes_on_logical_cpus() -> None:
    words = gpu_tests("--gpu-stand-ins", "-k", SAMPLE).split()
    assert words[1] == "passed,"
    assert int(words[0]) >= 5

"""Jobs and the doctor on GPUs, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT
from tests.support import gpu_machine, parity_cases, small

pytestmark = [pytest.mark.gpu, pytest.mark.multi_process]

WORKER = """
import json, sys, tfpar
from tests.support import small
strategy = tfpar.MultiWorker()
import tensorflow as tf
tf.config.experimental.enable_tensor_float_32_execution(False)
trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
history = trainer.fit(small.data(), epochs=2, verbose=0).history
if strategy.is_chief:
    weights = [weight.tolist() for weight in trainer.model.get_weights()]
    with open(sys.argv[1], "w") as file:
        json.dump([strategy.num_workers, strategy.device_names, history["loss"], weights], file)
"""


def run(*command: str, timeout_seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_seconds,
    )


def test_the_launcher_gives_each_worker_its_gpus_and_the_job_equals_one_device(gpus: list[str], tmp_path: Path) -> None:
    num_workers = min(2, gpu_machine.num_cards()) or 2
    (tmp_path / "worker.py").write_text(WORKER)
    found = tmp_path / "found.json"
    script = [str(tmp_path / "worker.py"), str(found)]
    ended = run("tfpar.launch", f"--num_workers={num_workers}", "--", *script)
    assert ended.returncode == 0, ended.stderr[-2000:]
    number, devices, losses, weights = json.loads(found.read_text())
    assert number == num_workers
    kind = gpus[0].partition(":")[0]
    assert devices[0] == f"{kind}:0"
    model = small.initial_model()
    expected = model.fit(small.data(), epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert len(weights[-1]) == parity_cases.NUM_CLASSES


def test_the_doctor_finds_nothing_wrong(gpus: list[str]) -> None:
    ended = run("tfpar.doctor")
    assert ended.returncode in (0, 1), f"{ended.stdout[-3000:]}{ended.stderr[-1000:]}"
    assert "WRONG" not in ended.stdout
    assert gpus

"""Workers that create different strategies, or the same with other options, are refused before they wait for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.ports import free_addresses

pytestmark = pytest.mark.multi_process

SCRIPT = """
import os, sys
import tfpar
try:
    eval(os.environ["STRATEGY"], {"tfpar": tfpar})
except ValueError as error:
    sys.exit(f"refused: {error}")
"""
MULTI = "tfpar.MultiWorker({})"
CASES = {
    "whole weights and shares": (
        MULTI.format("shard='weights'"), MULTI.format(""),
        "must create the same strategy, and worker 1 (ADDRESS) creates MultiWorker, the chief "
        "MultiWorker(shard='weights').",
    ),
    "replicas and pipelines": (
        MULTI.format("shard='optimizer'"), "tfpar.Hybrid(tfpar.Pipeline(1, num_microbatches=2), shard='optimizer')",
        "creates Hybrid(shard='optimizer'), the chief MultiWorker(shard='optimizer').",
    ),
    "rounded gradients": (
        MULTI.format("compression='bfloat16'"), MULTI.format(""),
        "worker 1 (ADDRESS) differs from the chief in compression ('None' instead of 'bfloat16').",
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("chiefs", "others", "sentence"), CASES.values(), ids=CASES)
def test_workers_that_differ_all_say_so(chiefs: str, others: str, sentence: str) -> None:
    addresses = free_addresses(2)
    job = {"cluster": {"worker": addresses}}
    started = []
    for rank, strategy in enumerate([chiefs, others]):
        place = json.dumps({**job, "task": {"type": "worker", "index": rank}})
        environment = {**os.environ, "TF_CONFIG": place, "STRATEGY": strategy, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert sentence.replace("ADDRESS", addresses[1]) in errors[errors.find("refused: ") :]
    finally:
        for process in started:
            process.kill()
            process.wait()

"""The program of a worker of the doctor with a fault: `TFPAR_TEST_FAULT=KIND RANK`.

version 1    it has another version of Keras
closed 1     its port is closed
clock 1      its clock is five seconds fast
blocked 1    it cannot connect to worker 2
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from tests.support.faulty_devices import VARIABLE
from tfpar.checks import worker_program, worker_service
from tfpar.cluster import tf_config

if __name__ == "__main__":
    kind, rank = os.environ[VARIABLE].split()
    job = tf_config.from_environment(os.environ)
    assert job is not None
    if job.rank == int(rank):
        facts = worker_service.facts
        if kind == "closed":
            sys.exit(1)
        if kind == "version":
            worker_service.facts = lambda: {**facts(), "keras": "3.14.0"}
        if kind == "clock":
            fast: Any = SimpleNamespace(time=lambda: time.time() + 5.0, perf_counter=time.perf_counter)
            worker_service.time = fast
        if kind == "blocked":
            problem = {job.addresses[2]: "Connection timed out"}
            worker_service.reachability = SimpleNamespace(problems=lambda addresses, seconds: problem)  # type: ignore
    sys.exit(worker_program.main())

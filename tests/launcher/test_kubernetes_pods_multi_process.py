"""The pods of a JobSet, each on a host with an address of its own: they find each other, are evicted, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import faults, hosts, kubelet
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)
from tfpar.launcher import manifests

pytestmark = [pytest.mark.multi_process, pytest.mark.slow_start, pytest.mark.usefixtures("leaves_nothing_behind")]

TIMEOUT_SECONDS = 120.0
FLAGS = [*faults.FLAGS, *faults.STRIKING, *faults.OF_A_JOB]
# Starts a container on its host, with a file of the names that the JobSet's service gives to the pods.
CONTAINER = """
import os, subprocess, sys
hosts, *arguments = sys.argv[1:]
subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
os.execvp(sys.executable, [sys.executable, *arguments])
"""


def jobset_spec(*more_flags: str) -> dict[str, Any]:
    """The specification of the JobSet of two workers, as YAML reads it."""
    read = yaml.safe_load_all(manifests.jobset_manifest(2, ["python", *faults.TRAIN, *FLAGS, *more_flags], 1))
    (spec,) = (document["spec"] for document in read if document and document["kind"] == "JobSet")
    return dict(spec)


def attempt(spec: dict[str, Any], machines: list[hosts.Host], folder: Path) -> tuple[list[int], str]:
    """Start the container of each pod and wait for their ends; return the exit codes and the outputs."""
    (job,) = spec["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    names = [f"{host.address} tfpar-worker-0-{index}.tfpar\n" for index, host in enumerate(machines)]
    (folder / "hosts").write_text("".join(names))
    outputs = [folder / f"{index}.out" for index in range(len(machines))]
    processes = []
    for index, host in enumerate(machines):
        variables = {**kubelet.environment(container, "tfpar", index), "TFPAR_JOB_SECRET": "of a Secret of the cluster"}
        program, *arguments = container["command"]
        assert program == "python"
        in_container = ["-c", CONTAINER, str(folder / "hosts"), *arguments]
        processes.append(hosts.start(host, in_container, folder, variables, outputs[index]))
    with hosts.ended_in_the_end(processes):
        codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
    return codes, "\n".join(path.read_text() for path in outputs)


@pytest.mark.extended
def test_evicted_pods_save_and_new_ones_end_as_one_device_would(tmp_path: Path) -> None:
    folder, alone = faults.prepare(tmp_path / "pods", "1-step-TERM-1"), faults.prepare(tmp_path / "alone")
    assert faults.run([*faults.TRAIN, *FLAGS], alone).code == 0
    spec = jobset_spec()
    with hosts.connected(2) as machines:
        codes, output = attempt(spec, machines, folder)
        assert codes == [130, 130], output
        assert kubelet.action(spec, codes[1]) == "RestartJobSetAndIgnoreMaxRestarts"
        codes, output = attempt(spec, machines, folder)
    assert codes == [0, 0], output
    faults.assert_same_run(folder / "run", alone / "run")


@pytest.mark.extended
def test_a_wrong_configuration_fails_the_job_at_once(tmp_path: Path) -> None:
    spec = jobset_spec("--set", "training.epochs=none")
    with hosts.connected(2) as machines:
        codes, output = attempt(spec, machines, faults.prepare(tmp_path / "pods"))
    assert codes == [2, 2], output
    assert kubelet.action(spec, codes[0]) == "FailJobSet"

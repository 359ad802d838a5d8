"""A real Slurm of this machine alone: its variables, its parser of batch scripts, its signals and its queue.

The daemons run as the user's own processes, with ports from the system and everything they write in a temporary
folder. One host plays three nodes. Debian and Ubuntu: `apt-get install slurmctld slurmd slurm-client`.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_addresses
from tfpar.cluster import slurm, tf_config
from tfpar.cluster.tf_config import split_address
from tfpar.launcher import manifests

pytestmark = [
    pytest.mark.multi_process,
    pytest.mark.skipif(
        not all(map(shutil.which, ["slurmctld", "slurmd", "srun"])),
        reason="needs Slurm: apt-get install slurmctld slurmd slurm-client",
    ),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# Without authentication: the daemons must be unreachable from outside.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
# A job that goes back into the queue waits as long as its old credentials hold.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
# More CPUs than there are.
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
KNOWN_VERSION = "22.05"  # Debian 12's
DEVICE_FILES = ["full", "null", "random", "zero"]
NODES = ["node01", "node02", "localhost"]
PRINT_JOB = "import os; from tfpar.cluster import tf_config; print(repr(tf_config.from_environment(os.environ)))"
PRINT_GPUS = """
import os
from tfpar.cluster.gpu import gpus, slurm_gpus
num_visible = len(gpus.named_in(os.environ))
print(num_visible, slurm_gpus.share(os.environ, num_visible))
"""
# A worker that behaves as tfpar.train: on a request to stop it saves and exits with 130, and then resumes.
WORKER = """
import os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1], os.environ["SLURM_PROCID"])
signal.signal(signal.SIGTERM, lambda *_: (place.write_text("saved"), sys.exit(130)))
if place.exists():
    print("resumes, as it was", place.read_text(), flush=True)
    sys.exit()
place.write_text("started")
print("waits", flush=True)
time.sleep(60)
"""


class Slurm:
    """One controller and a daemon a node, and the commands that speak to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONUNBUFFERED": "1"}
        controller_port, *node_ports = [split_address(address)[1] for address in free_addresses(1 + len(NODES))]
        host = socket.gethostname().partition(".")[0]
        # Each node has four GPUs: Slurm only needs device files, and opens none.
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in DEVICE_FILES))
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:4 State=UNKNOWN"
            for name, port in zip(NODES, node_ports, strict=True)
        ]
        values = {"host": host, "controller_port": controller_port, "user": getpass.getuser(), "folder": folder}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(nodes="\n".join(nodes), **values))
        self.daemons = [self.start("slurmctld", "-D"), *(self.start("slurmd", "-D", "-N", name) for name in NODES)]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "daemons.log", "ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints, within 20 seconds."""
        completed = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=20, check=False
        )
        assert not check or completed.returncode == 0, f"{command}:\n{completed.stdout}{completed.stderr}"
        return completed.stdout + completed.stderr

    def submit(self, script: str, *options: str) -> str:
        """Hand a batch script in; return the number of its job."""
        path = self.folder / "job.sh"
        path.write_text(script)
        return self.run("sbatch", "--parsable", *options, str(path)).strip()

    def field(self, job: str, name: str) -> str:
        """One field of what Slurm knows of a job."""
        return re.findall(rf"\b{name}=(\S*)", self.run("scontrol", "show", "job", job))[0]

    def is_ready(self) -> bool:
        for daemon in self.daemons:
            assert daemon.poll() is None, self.log()
        return self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split() == ["idle"] * len(NODES)

    def log(self) -> str:
        return (self.folder / "daemons.log").read_text()[-3000:]

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self.run("scancel", "--signal=KILL", "--user", getpass.getuser(), check=False)
        self.run("scancel", "--user", getpass.getuser(), check=False)
        try:
            wait_until(lambda: not self.run("squeue", "--noheader", check=False), "the queue is empty")
        finally:
            for daemon in self.daemons:
                daemon.terminate()
            for daemon in self.daemons:
                try:
                    daemon.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def wait_until(condition: Callable[[], object], what: str, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm that is ready for jobs."""
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            wait_until(cluster.is_ready, "all nodes are idle")
        except AssertionError as error:
            if KNOWN_VERSION in (version := cluster.run("slurmctld", "-V")):
                raise
            pytest.skip(f"{version.strip()} does not take a configuration made for {KNOWN_VERSION}: {error}")
        yield cluster
    finally:
        cluster.stop()


def test_every_task_of_srun_knows_all_addresses_and_its_rank(cluster: Slurm) -> None:
    nodes = ["--nodes=2", "--nodelist=node[01-02]", "--ntasks=3"]
    printed = cluster.run(
        "srun", *nodes, "--label", sys.executable, "-c", "import os; print(os.environ['SLURM_JOB_ID'])\n" + PRINT_JOB
    )
    job_id, jobs = re.findall(r"0: (\d+)", printed)[0], re.findall(r"(\d): JobConfig\((.*)\)", printed)
    port = slurm.first_port(int(job_id), 0)
    addresses = (f"node01:{port}", f"node01:{port + 1}", f"node02:{port}")
    assert sorted(jobs) == [
        ("0", f"addresses={addresses}, rank=0, role='chief'"),
        ("1", f"addresses={addresses}, rank=1, role='worker'"),
        ("2", f"addresses={addresses}, rank=2, role='worker'"),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "seen", "shares"),
    [
        (["--gpus-per-node=4"], [4, 4], [range(2), range(2, 4)]),
        (["--gpus-per-task=1"], [1, 1], [None, None]),
        (["--gpus-per-task=2"], [2, 2], [None, None]),
        (["--gpus-per-node=4", "--gpu-bind=single:1"], [1, 1], [None, None]),
        (["--gpus-per-node=4", "--gpu-bind=per_task:2"], [2, 2], [None, None]),
    ],
    ids=["all see all", "one bound", "two bound", "one each", "two each"],
)
def test_gpus_of_a_step_are_divided_over_its_tasks_unless_slurm_has_done_so(
    options: list[str], seen: list[int], shares: list[range | None], cluster: Slurm
) -> None:
    printed = cluster.run("srun", "--nodes=1", "--ntasks=2", "--label", *options, sys.executable, "-c", PRINT_GPUS)
    found = sorted(re.findall(r"^(\d): (\d) (.*)$", printed, re.MULTILINE))
    assert found == [(str(task), str(seen[task]), str(shares[task])) for task in range(2)]


def test_a_batch_script_and_a_step_of_one_task_are_no_job_but_each_step_of_several_is_one(cluster: Slurm) -> None:
    (cluster.folder / "who.py").write_text(PRINT_JOB)
    who = f"{sys.executable} {cluster.folder}/who.py"
    steps = f"{who}; srun --ntasks=1 {who}; srun --ntasks=2 {who}; srun --ntasks=2 {who}"
    job = cluster.submit(
        f"#!/bin/bash\n{steps}; touch ended", "--ntasks=2", "--nodelist=localhost", "--output=steps.log"
    )
    wait_until((cluster.folder / "ended").exists, "the script has ended")
    lines = re.findall(r"^(?:None|JobConfig).*", (cluster.folder / "steps.log").read_text(), re.MULTILINE)
    assert lines[:2] == ["None", "None"]
    ports = [slurm.first_port(int(job), step_id) for step_id in (1, 2)]
    assert [sorted(lines[2:4]), sorted(lines[4:])] == [
        [
            repr(tf_config.JobConfig((f"localhost:{port}", f"localhost:{port + 1}"), rank, role))
            for rank, role in [(0, "chief"), (1, "worker")]
        ]
        for port in ports
    ]


def test_tasks_dealt_out_to_the_nodes_in_turn_are_refused(cluster: Slurm) -> None:
    nodes = ["--nodes=2", "--nodelist=node[01-02]", "--ntasks=4", "--distribution=cyclic", "--kill-on-bad-exit=0"]
    printed = cluster.run("srun", *nodes, sys.executable, "-c", PRINT_JOB, check=False)
    assert "ValueError: Tasks must fill one node after the other, received task 1 as number 0 of node 1 " in printed


@pytest.mark.parametrize("hostlist", ["node[01-03,7],gpu1", "rack[1-2]n[09-11]", "n[98-101],a,b[2,1]"])
def test_lists_of_hosts_are_read_as_slurm_reads_them(cluster: Slurm, hostlist: str) -> None:
    assert slurm.expand_hosts(hostlist) == cluster.run("scontrol", "show", "hostnames", hostlist).split()


def test_the_printed_script_saves_on_sigterm_is_requeued_and_resumes(cluster: Slurm) -> None:
    worker, places = cluster.folder / "worker.py", cluster.folder / "a place"
    worker.write_text(WORKER)
    places.mkdir()
    job = cluster.submit(manifests.slurm_script(2, [sys.executable, str(worker), str(places)], 2))
    log = cluster.folder / f"tfpar-{job}.log"
    wait_until(lambda: log.exists() and log.read_text().count("waits") == 2, "both workers have started")
    # As Slurm does it 120 seconds before the end of the time, and before a preemption.
    cluster.run("scancel", "--signal=TERM", job)
    wait_until(lambda: cluster.field(job, "Restarts") == "1", "the job is in the queue again")
    wait_until(lambda: cluster.field(job, "JobState") == "COMPLETED", "the job has ended well", seconds=20)
    lines = sorted(re.findall(r"^\d: (?:waits|resumes).*", log.read_text(), re.MULTILINE))
    assert lines == [f"{rank}: {word}" for rank in (0, 1) for word in ("resumes, as it was saved", "waits")]


def test_a_job_that_its_user_cancels_does_not_come_back(cluster: Slurm) -> None:
    worker, places = cluster.folder / "worker.py", cluster.folder / "cancelled"
    worker.write_text(WORKER)
    places.mkdir()
    job = cluster.submit(manifests.slurm_script(2, [sys.executable, str(worker), str(places)], 2))
    wait_until(lambda: len(list(places.iterdir())) == 2, "both workers have started")
    cluster.run("scancel", job)
    wait_until(lambda: not cluster.run("squeue", "--noheader", "--job", job, check=False), "the job has left the queue")
    assert (cluster.field(job, "JobState"), cluster.field(job, "Restarts")) == ("CANCELLED", "0")


def test_a_worker_that_fails_is_named_and_ends_the_job(cluster: Slurm) -> None:
    fails = "import os, sys, time; os.environ['SLURM_PROCID'] == '1' and sys.exit(3); time.sleep(60)"
    job = cluster.submit(manifests.slurm_script(2, [sys.executable, "-c", fails], 1))
    wait_until(lambda: cluster.field(job, "JobState") == "FAILED", "the job has failed")
    assert "task 1: Exited with exit code 3" in (cluster.folder / f"tfpar-{job}.log").read_text()
    assert cluster.field(job, "Restarts") == "0"

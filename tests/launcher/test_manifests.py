"""The script for Slurm: valid bash with Slurm's options. The jobs that neither it nor a manifest can start."""

import re
import subprocess
from typing import Any

import pytest

from tfpar.launcher import manifests

PRINTERS = [
    manifests.slurm_script,
    manifests.jobset_manifest,
    manifests.trainjob_manifest,
    manifests.tfjob_manifest,
]
COMMAND = ["python", "-m", "tfpar.train", "--set", "data.name=it's", '--directory=/runs/"a b"', "$(HOME) #é"]


def test_the_slurm_script_asks_for_a_task_a_worker_and_cores_for_each() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", manifests.slurm_script(3, COMMAND, 4), re.MULTILINE)
    assert dict(options) == {
        "job-name": "tfpar",
        "ntasks": "3",
        "cpus-per-task": "4",
        "time": "24:00:00",
        "signal": "TERM@120",
        "requeue": "",
        "output": "tfpar-%j.log",
        "open-mode": "append",
    }


def test_the_slurm_script_asks_for_gpus_for_each_task_of_job_and_step() -> None:
    script = manifests.slurm_script(3, COMMAND, 4, 2)
    assert re.findall(r"^#SBATCH --gpus-per-task=(.*)$", script, re.MULTILINE) == ["2"]
    assert re.findall(r"^srun .* --gpus-per-task=(\d+) ", script, re.MULTILINE) == ["2"]
    assert "gpus-per-task" not in manifests.slurm_script(3, COMMAND, 4)


def test_all_options_of_the_slurm_script_stand_before_its_first_command() -> None:
    lines = manifests.slurm_script(3, COMMAND, 4).splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")], "sbatch would not read these"


def test_bash_gets_the_command_word_by_word() -> None:
    script = manifests.slurm_script(3, COMMAND, 4)
    stand_ins = 'srun() { printf "%s\\0" "$@"; }\nscontrol() { echo unexpected; }\n'
    completed = subprocess.run(["bash", "-c", stand_ins + script], capture_output=True, text=True, check=True)
    words = completed.stdout.split("\0")[:-1]
    assert words == ["--kill-on-bad-exit=1", "--distribution=block", "--cpus-per-task=4", "--label", *COMMAND]


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, "", ""), (1, "", ""), (130, "", "requeue 7\n"), (130, "99", "requeue 7\n"), (130, "100", ""), (137, "", "")],
)
def test_only_workers_that_have_saved_go_back_into_the_queue(code: int, restarts: str, requeued: str) -> None:
    script = manifests.slurm_script(2, COMMAND, 1)
    variables = f"SLURM_JOB_ID=7\nSLURM_RESTART_COUNT={restarts}\n"
    stand_ins = f'srun() {{ return {code}; }}\nscontrol() {{ echo "$@"; }}\n'
    completed = subprocess.run(
        ["bash", "-c", variables + stand_ins + script], capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (code, requeued)


def test_each_start_of_a_slurm_job_has_a_new_secret_that_is_no_argument() -> None:
    script = manifests.slurm_script(2, ["python"], 1)
    shown = 'srun() { printenv TFPAR_JOB_SECRET; echo "$@"; }\n'
    turns = [
        subprocess.run(["bash", "-c", shown + script], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    secrets = [secret for secret, _ in turns]
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
    assert secrets[0] != secrets[1]
    assert not any(secret in arguments for secret, arguments in turns)


def test_the_slurm_script_says_that_tensorflows_ports_need_a_trusted_network() -> None:
    assert "20000 to 32735, have no authentication" in manifests.slurm_script(2, COMMAND, 1)


@pytest.mark.parametrize("printer", PRINTERS)
@pytest.mark.parametrize(
    ("num_workers", "command", "cores", "message"),
    [
        (0, ["python"], 1, "^num_workers must be at least 1, received 0. A job needs"),
        (1, ["python"], -1, "^cores_per_worker must be at least 1, received -1. A job needs"),
        (1, [], 1, "^command must have the words that run a worker, received none. Try"),
    ],
)
def test_a_job_that_cannot_run_is_refused(
    printer: Any, num_workers: int, command: list[str], cores: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        printer(num_workers, command, cores)


@pytest.mark.parametrize("printer", PRINTERS)
def test_a_negative_number_of_gpus_is_refused(printer: Any) -> None:
    with pytest.raises(ValueError, match=r"^gpus_per_worker must be at least 0, received -1\. Leave it out"):
        printer(1, ["python"], 1, -1)

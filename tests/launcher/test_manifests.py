"""The scripts and manifests for batch systems: valid bash with Slurm's options, and a valid TFJob."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tfpar.launcher import manifests

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


def test_the_manifest_limits_the_gpus_of_every_pod(tfjob: dict[str, Any]) -> None:
    for replicas in tfjob["spec"]["tfReplicaSpecs"].values():
        resources = replicas["template"]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com" not in manifests.tfjob_manifest(3, COMMAND, 4)


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


def test_both_say_that_tensorflows_port_needs_a_trusted_network(policy: dict[str, Any], tfjob: dict[str, Any]) -> None:
    assert "20000 to 32735, have no authentication" in manifests.slurm_script(2, COMMAND, 1)
    assert "TensorFlow's port has no authentication" in manifests.tfjob_manifest(2, COMMAND, 1)
    spec, pods = policy["spec"], {"matchLabels": {"training.kubeflow.org/job-name": tfjob["metadata"]["name"]}}
    assert spec == {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}


def documents() -> list[dict[str, Any]]:
    """The manifest of three workers, as YAML reads it."""
    yaml = pytest.importorskip("yaml", reason="reads the manifest; comes with kubeflow-training")
    return [one for one in yaml.safe_load_all(manifests.tfjob_manifest(3, COMMAND, 4, 2)) if one]


@pytest.fixture
def policy() -> dict[str, Any]:
    """Who may connect to the pods of three workers."""
    return documents()[0]


@pytest.fixture
def tfjob() -> dict[str, Any]:
    """The job of three workers."""
    return documents()[1]


def test_the_manifest_fits_the_models_of_kubeflow_and_kubernetes(policy: dict[str, Any], tfjob: dict[str, Any]) -> None:
    training = pytest.importorskip("kubeflow.training", reason="has the models of TFJob")
    assert not list(problems(tfjob, "KubeflowOrgV1TFJob", training))
    assert not list(problems(policy, "V1NetworkPolicy", training))


def problems(value: Any, kind: str, training: Any, path: str = "") -> Iterator[str]:
    """What the generated models of Kubeflow and Kubernetes would not take; their own readers skip unknown keys."""
    from kubernetes.client import models

    if container := re.fullmatch(r"(list|dict)[\[(](?:str, )?(.+)[\])]", kind):
        if type(value).__name__ != container[1]:
            yield f"{path}: {value!r} is no {kind}"
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from problems(item, container[2], training, f"{path}.{key}")
        return
    model = getattr(training, kind, None) or getattr(models, kind, None)
    if model is None:
        if type(value).__name__ != kind:
            yield f"{path}: {value!r} is no {kind}"
        return
    attributes = {key: attribute for attribute, key in model.attribute_map.items()}
    for key, item in sorted(value.items()):
        if key in attributes:
            yield from problems(item, model.openapi_types[attributes[key]], training, f"{path}.{key}")
        else:
            yield f"{path}.{key}: unknown to {kind}"
    try:
        model(**{attributes[key]: item for key, item in value.items() if key in attributes})
    except ValueError as error:
        yield f"{path}: {error}"


def test_the_operator_finds_its_container_and_a_policy_that_it_knows(tfjob: dict[str, Any]) -> None:
    assert (tfjob["apiVersion"], tfjob["kind"]) == ("kubeflow.org/v1", "TFJob")
    for replicas in tfjob["spec"]["tfReplicaSpecs"].values():
        assert [container["name"] for container in replicas["template"]["spec"]["containers"]] == ["tensorflow"]
        assert replicas["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert tfjob["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")


def test_one_replica_is_the_chief_and_it_alone_has_a_disk(tfjob: dict[str, Any]) -> None:
    chief, worker = (tfjob["spec"]["tfReplicaSpecs"][name] for name in ("Chief", "Worker"))
    assert (chief["replicas"], worker["replicas"]) == (1, 2)
    pod = chief["template"]["spec"]
    assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == [pod["volumes"][0]["name"]]
    assert "volumes" not in worker["template"]["spec"]


def test_every_pod_runs_the_same_command_with_its_cores_and_time_to_save(tfjob: dict[str, Any]) -> None:
    for replicas in tfjob["spec"]["tfReplicaSpecs"].values():
        pod = replicas["template"]["spec"]
        container = pod["containers"][0]
        assert [word.replace("$$(", "$(") for word in container["command"]] == COMMAND
        *threads, secret = container["env"]
        assert {variable["value"] for variable in threads} == {"4"}
        assert secret["name"] == "TFPAR_JOB_SECRET"
        assert secret["valueFrom"] == {"secretKeyRef": {"name": "tfpar-job", "key": "secret"}}
        assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"] == "4"
        assert pod["terminationGracePeriodSeconds"] == 120


def test_one_worker_is_a_chief_alone() -> None:
    manifest = manifests.tfjob_manifest(1, COMMAND, 1)
    assert "Chief:" in manifest
    assert "Worker:" not in manifest


@pytest.mark.parametrize("printer", [manifests.slurm_script, manifests.tfjob_manifest])
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


@pytest.mark.parametrize("printer", [manifests.slurm_script, manifests.tfjob_manifest])
def test_a_negative_number_of_gpus_is_refused(printer: Any) -> None:
    with pytest.raises(ValueError, match=r"^gpus_per_worker must be at least 0, received -1\. Leave it out"):
        printer(1, ["python"], 1, -1)

"""The manifests for Kubernetes: a JobSet, a TrainJob of Kubeflow Trainer v2 and a legacy TFJob."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support import kubelet
from tfpar.cluster import tf_config
from tfpar.launcher import manifests

COMMAND = ["python", "-m", "tfpar.train", "--set", "data.name=it's", '--directory=/runs/"a b"', "$(HOME) #é"]
PRINTERS = {
    "JobSet": manifests.jobset_manifest,
    "TrainJob": manifests.trainjob_manifest,
    "TFJob": manifests.tfjob_manifest,
}
JOBSET_KINDS = ["JobSet", "TrainJob"]


def documents(kind: str, num_workers: int = 3, gpus: int = 2) -> dict[str, dict[str, Any]]:
    """The documents of the manifest that has a kind, by their own kinds, as YAML reads them."""
    read = yaml.safe_load_all(PRINTERS[kind](num_workers, COMMAND, 4, gpus))
    return {document["kind"]: document for document in read if document}


def jobset_spec(kind: str, num_workers: int = 3) -> dict[str, Any]:
    """The specification of the JobSet, or that of the template from which Kubeflow Trainer makes it."""
    read = documents(kind, num_workers)
    spec: dict[str, Any] = (
        read[kind]["spec"] if kind == "JobSet" else read["TrainingRuntime"]["spec"]["template"]["spec"]
    )
    return spec


def pods(kind: str) -> list[dict[str, Any]]:
    """The specification of each pod that differs from the others."""
    if kind == "TFJob":
        replicas = documents(kind)[kind]["spec"]["tfReplicaSpecs"].values()
        return [described["template"]["spec"] for described in replicas]
    (job,) = jobset_spec(kind)["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"]]


def containers(kind: str) -> list[dict[str, Any]]:
    return [container for pod in pods(kind) for container in pod["containers"]]


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("JobSet", "JobsetV1alpha2JobSet"),
        ("TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
        ("TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_the_documents_fit_the_models_of_jobset_and_kubeflow_trainer(kind: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="has the models of JobSet and TrainJob")
    document = documents("JobSet" if kind == "JobSet" else "TrainJob")[kind]
    known = getattr(models, model).from_dict(document).to_dict()
    assert not list(unknown(document, known))


def unknown(document: Any, known: Any, path: str = "") -> Iterator[str]:
    """The parts of a document that its model does not have: the generated models leave them out in silence."""
    if isinstance(document, dict) and isinstance(known, dict):
        for key, item in document.items():
            yield from unknown(item, known.get(key), f"{path}.{key}")
    elif isinstance(document, list) and isinstance(known, list) and len(document) == len(known):
        for index, items in enumerate(zip(document, known, strict=True)):
            yield from unknown(*items, f"{path}.{index}")
    elif document != known:
        yield f"{path}: {document!r} became {known!r}"


def test_the_tfjob_and_the_policies_fit_the_models_of_kubeflow_and_kubernetes() -> None:
    training = pytest.importorskip("kubeflow.training", reason="has the models of TFJob")
    assert not list(problems(documents("TFJob")["TFJob"], "KubeflowOrgV1TFJob", training))
    for kind in PRINTERS:
        assert not list(problems(documents(kind)["NetworkPolicy"], "V1NetworkPolicy", training))
    for pod in pods("JobSet"):
        assert not list(problems(pod, "V1PodSpec", training))


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


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("JobSet", "jobset.sigs.k8s.io/jobset-name"),
        ("TrainJob", "jobset.sigs.k8s.io/jobset-name"),
        ("TFJob", "training.kubeflow.org/job-name"),
    ],
)
def test_only_the_pods_of_the_job_may_connect_to_each_other(kind: str, label: str) -> None:
    read = documents(kind)
    selected = {"matchLabels": {label: read[kind]["metadata"]["name"]}}
    ingress = [{"from": [{"podSelector": selected}]}]
    assert read["NetworkPolicy"]["spec"] == {"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress}
    assert "TensorFlow's port has no authentication" in PRINTERS[kind](2, COMMAND, 1)


@pytest.mark.parametrize("kind", PRINTERS)
def test_every_pod_has_its_cores_gpus_secret_and_time_to_save(kind: str) -> None:
    for container in containers(kind):
        variables = {variable["name"]: variable for variable in container["env"]}
        threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
        assert {variables[name]["value"] for name in threads} == {"4"}
        secret = {"secretKeyRef": {"name": "tfpar-job", "key": "secret"}}
        assert variables["TFPAR_JOB_SECRET"]["valueFrom"] == secret
        assert container["resources"]["requests"]["cpu"] == "4"
        assert container["resources"]["limits"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "2"}
    assert {pod["terminationGracePeriodSeconds"] for pod in pods(kind)} == {120}
    assert "nvidia.com" not in PRINTERS[kind](3, COMMAND, 4)


@pytest.mark.parametrize("kind", PRINTERS)
def test_every_pod_runs_the_same_command(kind: str) -> None:
    if kind == "TrainJob":
        commands = [documents(kind)[kind]["spec"]["trainer"]["command"]]
        assert not any("command" in container for container in containers(kind)), "the TrainJob sets it"
    else:
        commands = [container["command"] for container in containers(kind)]
    for command in commands:
        assert [word.replace("$$(", "$(") for word in command] == COMMAND


@pytest.mark.parametrize(("kind", "pod"), [("JobSet", "worker"), ("TrainJob", "node")])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_tf_config_lists_the_pods_by_their_names_and_says_which_one_this_is(
    kind: str, pod: str, num_workers: int
) -> None:
    (job,) = jobset_spec(kind, num_workers)["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    for index in range(num_workers):
        # A job of another name, as a second TrainJob with the same TrainingRuntime.
        config = tf_config.parse(kubelet.environment(container, "mine", index)["TF_CONFIG"])
        # JobSet names pods <JobSet>-<replicated job>-<job index>-<completion index>, in the subdomain <JobSet>.
        assert config.addresses == tuple(f"mine-{pod}-0-{rank}.mine:{port}" for rank in range(num_workers))
        assert (config.rank, config.is_chief) == (index, index == 0)


@pytest.mark.parametrize("kind", JOBSET_KINDS)
def test_all_workers_start_and_restart_together_under_stable_names(kind: str) -> None:
    spec = jobset_spec(kind)
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    (job,) = spec["replicatedJobs"]
    assert job["replicas"] == 1
    described = job["template"]["spec"]
    assert (described["parallelism"], described["completions"], described["completionMode"]) == (3, 3, "Indexed")
    assert described["backoffLimit"] == 0
    assert described["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy requires it"


@pytest.mark.parametrize(
    ("code", "is_disrupted", "action"),
    [
        (1, False, "RestartJobSet"),
        (2, False, "FailJobSet"),
        (3, False, "RestartJobSet"),
        (130, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (130, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, False, "RestartJobSet"),
    ],
)
@pytest.mark.parametrize("kind", JOBSET_KINDS)
def test_interruptions_are_not_counted_and_a_wrong_configuration_is_final(
    kind: str, code: int, is_disrupted: bool, action: str
) -> None:
    assert kubelet.action(jobset_spec(kind), code, is_disrupted) == action


@pytest.mark.parametrize("kind", JOBSET_KINDS)
def test_every_pod_has_the_run_directory_and_shared_memory_for_nccl(kind: str) -> None:
    (pod,) = pods(kind)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"runs": "/runs", "shared-memory": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "tfpar-runs"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_kubeflow_trainer_finds_its_pods_and_the_train_job_its_runtime() -> None:
    read = documents("TrainJob")
    runtime, train_job = read["TrainingRuntime"], read["TrainJob"]
    assert "trainer.kubeflow.org/framework" in runtime["metadata"]["labels"], "the Kubeflow SDK refuses it without"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in containers("TrainJob")] == ["node"]
    group, _, _ = runtime["apiVersion"].partition("/")
    reference = {"apiGroup": group, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert train_job["spec"]["runtimeRef"] == reference


@pytest.mark.parametrize("printer", [manifests.jobset_manifest, manifests.trainjob_manifest])
def test_more_workers_than_fit_into_tf_config_are_refused(printer: Any) -> None:
    (job,) = jobset_spec("JobSet", 1000)["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    longest = kubelet.environment(container, "x" * 45, 999)["TF_CONFIG"]
    assert len(f"TF_CONFIG={longest}") < 128 << 10, "Linux' limit"
    with pytest.raises(ValueError, match=r"^num_workers must be at most 1000, received 1001: the TF_CONFIG of more"):
        printer(1001, COMMAND, 4)


def test_the_tfjob_says_that_it_is_legacy_and_what_replaces_it() -> None:
    first, second, *_ = manifests.tfjob_manifest(2, COMMAND, 1).splitlines()
    assert first.startswith("# Legacy: TFJob belongs to Kubeflow's Training Operator v1.")
    assert second == "# jobset or trainjob instead."


def test_the_operator_of_tfjobs_finds_its_container_and_a_policy_that_it_knows() -> None:
    tfjob = documents("TFJob")["TFJob"]
    assert (tfjob["apiVersion"], tfjob["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert {container["name"] for container in containers("TFJob")} == {"tensorflow"}
    for replicas in tfjob["spec"]["tfReplicaSpecs"].values():
        assert replicas["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert tfjob["spec"]["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")


def test_one_replica_of_a_tfjob_is_the_chief_and_it_alone_has_a_disk() -> None:
    replicas = documents("TFJob")["TFJob"]["spec"]["tfReplicaSpecs"]
    assert {name: described["replicas"] for name, described in replicas.items()} == {"Chief": 1, "Worker": 2}
    chief, worker = (replicas[name]["template"]["spec"] for name in ("Chief", "Worker"))
    assert [mount["name"] for mount in chief["containers"][0]["volumeMounts"]] == [chief["volumes"][0]["name"]]
    assert "volumes" not in worker


def test_a_tfjob_of_one_worker_is_a_chief_alone() -> None:
    assert list(documents("TFJob", num_workers=1)["TFJob"]["spec"]["tfReplicaSpecs"]) == ["Chief"]

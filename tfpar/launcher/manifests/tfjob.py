"""A TFJob of Kubeflow's Training Operator v1, which Kubeflow Trainer v2 replaces: for clusters that still have it."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.launcher.manifests import arguments
from tfpar.launcher.manifests.pods import (
    INSTRUCTIONS,
    RUNS_MOUNT,
    RUNS_VOLUME,
    STOP_SECONDS,
    container,
    indented,
    network_policy,
)

RESTARTS_A_WORKER = 10


def tfjob_manifest(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int = 0) -> str:
    """Return a manifest for `kubectl apply`: a TFJob of Kubeflow's Training Operator v1 and its network policy.

    Legacy: the Training Operator is succeeded by Kubeflow Trainer v2, which has no TFJob; see `trainjob_manifest`.

    The chief is a separate replica type because it alone accesses the run directory, so that a volume mounted by a
    single node suffices. If one worker fails or is evicted, the others fail too, and all containers restart.

    Args:
        num_workers: Number of workers including the chief, at least 1.
        command: The command line of every worker, as words.
        cores_per_worker: Number of cores and threads per worker, at least 1.
        gpus_per_worker: Number of GPUs per worker.

    Raises:
        ValueError: If a number is below 1 or the command is empty.

    Example:
        >>> [line for line in tfjob_manifest(2, ["python", "-m", "tfpar.train"], 4).splitlines() if "kind" in line]
        ['kind: NetworkPolicy', 'kind: TFJob']
    """
    arguments.check(num_workers, command, cores_per_worker, gpus_per_worker)
    pod = _pod(command, cores_per_worker, gpus_per_worker)
    workers = f"    Worker:\n{_replicas(num_workers - 1)}{pod}" if num_workers > 1 else ""
    mount, volume = indented(RUNS_MOUNT, 16), indented(RUNS_VOLUME, 12)
    return f"""\
# Legacy: TFJob belongs to Kubeflow's Training Operator v1. On a cluster with JobSet or Kubeflow Trainer v2, print
# jobset or trainjob instead.
{INSTRUCTIONS}\
---
{network_policy("training.kubeflow.org/job-name")}\
---
apiVersion: kubeflow.org/v1
kind: TFJob
metadata:
  name: tfpar
spec:
  runPolicy:
    cleanPodPolicy: Running
    # Restarts of all containers together, after which the job has failed.
    backoffLimit: {RESTARTS_A_WORKER * num_workers}
  tfReplicaSpecs:
    Chief:
{_replicas(1)}{pod}\
              volumeMounts:
{mount}\
          volumes:
{volume}{workers}"""


def _replicas(count: int) -> str:
    return f"      replicas: {count}\n      restartPolicy: OnFailure\n"


def _pod(command: Sequence[str], cores: int, gpus: int) -> str:
    worker = container("tensorflow", command, "", cores, gpus)
    return f"""\
      template:
        metadata:
          annotations:
            # A service mesh would intercept the connections between the workers.
            sidecar.istio.io/inject: "false"
        spec:
          terminationGracePeriodSeconds: {STOP_SECONDS}
          containers:  # the operator looks for one named tensorflow
{indented(worker, 12)}"""

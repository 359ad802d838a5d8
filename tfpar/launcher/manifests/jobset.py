"""A JobSet: one Kubernetes Job whose pods are the workers, with the restarts of all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.commands.command_line import REPEATABLE
from tfpar.commands.start_up import INTERRUPTED
from tfpar.launcher import hosts
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

JOB_LABEL = "jobset.sigs.k8s.io/jobset-name"
MAX_RESTARTS = 10
# TF_CONFIG lists two names of up to 45 characters for each worker, and Linux allows 128 KiB for a variable.
MAX_WORKERS = 1000
# Without a gang scheduler the pods that have started wait for the others, and fail after form_seconds.
QUEUE = """\
# FILL IN with Kueue, which starts all pods or none:
# labels: {kueue.x-k8s.io/queue-name: YOUR_QUEUE}
"""
_POLICIES = f"""\
network:
  enableDNSHostnames: true
  publishNotReadyAddresses: true  # the workers connect to each other before their pods are ready
successPolicy: {{operator: All}}
failurePolicy:
  # All workers start again together, from the last checkpoint, once the old pods have ended.
  restartStrategy: BlockingRecreate
  maxRestarts: {MAX_RESTARTS}
  rules:
    # After an eviction or a preemption all workers have saved. Such restarts are not counted.
    - name: interrupted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["exit code {INTERRUPTED} ", "condition DisruptionTarget "]
    # An error in flags, configuration or data (exit code {REPEATABLE}) would recur.
    - name: usageError
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
"""


def jobset_manifest(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int = 0) -> str:
    """Return a manifest for `kubectl apply`: a JobSet and its network policy.

    Worker 0 is the chief. If a worker fails or is evicted, all pods are replaced, and the workers resume from the last
    checkpoint. The job fails at once after an error in flags, configuration or data, which would recur.

    Args:
        num_workers: Number of workers, from 1 to 1000.
        command: The command line of every worker, as words.
        cores_per_worker: Number of cores and threads per worker, at least 1.
        gpus_per_worker: Number of GPUs per worker.

    Raises:
        ValueError: If a number is out of range or the command is empty.

    Example:
        >>> [line for line in jobset_manifest(2, ["python", "-m", "tfpar.train"], 4).splitlines() if "kind" in line]
        ['kind: NetworkPolicy', 'kind: JobSet']
    """
    arguments.check(num_workers, command, cores_per_worker, gpus_per_worker)
    spec = jobset_spec("worker", num_workers, command, cores_per_worker, gpus_per_worker)
    return f"""\
# For clusters with JobSet 0.10 or later (jobset.sigs.k8s.io).
{INSTRUCTIONS}\
---
{network_policy(JOB_LABEL)}\
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: tfpar
{indented(QUEUE, 2)}\
spec:
{indented(spec, 2)}"""


def jobset_spec(
    name: str, num_workers: int, command: Sequence[str], cores: int, gpus: int, job_metadata: str = ""
) -> str:
    """Return the `spec` of a JobSet, which is also the template of a TrainingRuntime.

    Args:
        name: The name of the replicated job and of its container.
        num_workers: Number of workers, from 1 to 1000.
        command: The command line of every worker, as words; empty for that of the image.
        cores: Number of cores and threads per worker.
        gpus: Number of GPUs per worker.
        job_metadata: The metadata of the Job, if it needs any.

    Raises:
        ValueError: If there are more workers than TF_CONFIG can list.

    Example:
        >>> jobset_spec("worker", 2, ["python", "script.py"], cores=4, gpus=0).splitlines()[0]
        'network:'
    """
    if num_workers > MAX_WORKERS:
        raise ValueError(
            f"num_workers must be at most {MAX_WORKERS}, received {num_workers}: the TF_CONFIG of more workers does "
            "not fit into an environment variable. Give each worker more GPUs or cores."
        )
    return f"""\
{_POLICIES}\
replicatedJobs:
  - name: {name}
    replicas: 1
    template:
{indented(job_metadata, 6)}\
      spec:
        completionMode: Indexed
        parallelism: {num_workers}
        completions: {num_workers}
        backoffLimit: 0  # a new pod alone could not join: the JobSet restarts all
        podFailurePolicy:
          rules:
            - action: FailJob
              onExitCodes: {{containerName: {name}, operator: In, values: [{REPEATABLE}, {INTERRUPTED}]}}
            - action: FailJob
              onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
        template:
{indented(_pod(name, num_workers, command, cores, gpus), 10)}"""


def _pod(name: str, num_workers: int, command: Sequence[str], cores: int, gpus: int) -> str:
    worker = container(name, command, _tf_config(name, num_workers), cores, gpus)
    return f"""\
metadata:
  annotations:
    # A service mesh would intercept the connections between the workers.
    sidecar.istio.io/inject: "false"
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: {STOP_SECONDS}
  containers:
{indented(worker, 4)}\
      ports:
        - {{name: tensorflow, containerPort: {hosts.FIRST_PORT}}}
      volumeMounts:
{indented(RUNS_MOUNT, 8)}\
        - {{name: shared-memory, mountPath: /dev/shm}}
  volumes:
    # All pods mount it, and worker 0 writes: over several nodes it must be ReadWriteMany.
{indented(RUNS_VOLUME, 4)}\
    # NCCL needs more shared memory than the 64 MB of a container. It counts as the container's memory.
    - name: shared-memory
      emptyDir: {{medium: Memory, sizeLimit: 1Gi}}
"""


def _tf_config(name: str, num_workers: int) -> str:
    """Return the variables that tell a pod who the workers are, and which of them it is; all pods have the same."""
    hosts_in_order = [f"$(JOBSET_NAME)-{name}-0-{index}.$(JOBSET_NAME)" for index in range(num_workers)]
    addresses = ",\n".join(f'"{host}:{hosts.FIRST_PORT}"' for host in hosts_in_order)
    return f"""\
# Kubernetes expands $(NAME) of variables that stand before. Worker 0 is the chief.
- name: JOBSET_NAME
  valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['{JOB_LABEL}']"}}}}
- name: JOB_COMPLETION_INDEX
  valueFrom:
    fieldRef: {{fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
- name: TF_CONFIG
  value: >-
    {{"cluster": {{"worker": [
{indented(addresses, 4)}
    ]}}, "task": {{"type": "worker", "index": $(JOB_COMPLETION_INDEX)}}}}
"""

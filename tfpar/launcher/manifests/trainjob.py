"""A TrainingRuntime, which describes the pods, and a TrainJob, which trains in them, of Kubeflow Trainer v2."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.launcher.manifests import arguments
from tfpar.launcher.manifests.jobset import JOB_LABEL, QUEUE, jobset_spec
from tfpar.launcher.manifests.pods import INSTRUCTIONS, command_lines, indented, network_policy

# Trainer looks for this label, and for a container of this name, to set the command and the number of pods.
_NAME = "node"
_ROLE = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}\n"


def trainjob_manifest(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int = 0) -> str:
    """Return a manifest for `kubectl apply`: a TrainingRuntime, a TrainJob that uses it, and their network policy.

    The TrainingRuntime is a template for any number of jobs with as many workers. Kubeflow Trainer makes a JobSet of
    both, with the pods and the restarts that `jobset_manifest` describes.

    Args:
        num_workers: Number of workers, from 1 to 1000; worker 0 is the chief.
        command: The command line of every worker, as words.
        cores_per_worker: Number of cores and threads per worker, at least 1.
        gpus_per_worker: Number of GPUs per worker.

    Raises:
        ValueError: If a number is out of range or the command is empty.

    Example:
        >>> [line for line in trainjob_manifest(2, ["python", "x.py"], 4).splitlines() if line.startswith("kind")]
        ['kind: NetworkPolicy', 'kind: TrainingRuntime', 'kind: TrainJob']
    """
    arguments.check(num_workers, command, cores_per_worker, gpus_per_worker)
    spec = jobset_spec(_NAME, num_workers, [], cores_per_worker, gpus_per_worker, _ROLE)
    return f"""\
# For clusters with Kubeflow Trainer 2.1 or later.
{INSTRUCTIONS}\
---
{network_policy(JOB_LABEL)}\
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: tfpar
  labels: {{trainer.kubeflow.org/framework: tensorflow}}  # the Kubeflow SDK knows runtimes by this label
spec:
  mlPolicy:
    numNodes: {num_workers}  # as many as TF_CONFIG lists, so a TrainJob must not set another number
  # FILL IN with the coscheduling plugin, which starts all pods or none:
  # podGroupPolicy: {{coscheduling: {{scheduleTimeoutSeconds: 300}}}}
  template:
    spec:
{indented(spec, 6)}\
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: tfpar
{indented(QUEUE, 2)}\
spec:
  runtimeRef: {{apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: tfpar}}
  trainer:
{indented(command_lines(command), 4)}"""

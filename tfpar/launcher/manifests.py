"""Files that start the same job on a cluster: a batch script for Slurm, a TFJob manifest for Kubernetes.

Printed by `python -m tfpar.launch --print slurm|tfjob`, to be read, filled in and kept by the user. Both systems ask a
worker to stop with SIGTERM: all save at the same step, and the job starts again later from that checkpoint.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence

from tfpar.cluster import job_secret, slurm

# Between SIGTERM and the end: time for the step in progress and for a checkpoint of a large model.
STOP_SECONDS = 120
RESTARTS_A_WORKER = 10
MAX_TURNS = 100  # of one Slurm job: srun tells the highest exit code only, which could hide an error behind a 130
_FIRST_PORT = slurm.FIRST_PORT
_LAST_PORT = slurm.FIRST_PORT + slurm.PORTS_A_STEP * slurm.NUM_SLOTS - 1
THREAD_SETTINGS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def slurm_script(num_workers: int, command: Sequence[str], cores_per_worker: int) -> str:
    """Return a batch script for `sbatch`, with one task a worker.

    Preemption, the end of the time limit and the loss of a node all put the job back into the queue, where it goes on
    from its last checkpoint. A failure does not: it would fail again.

    Args:
        num_workers: How many workers, at least 1.
        command: The command line of a worker, word by word; the same for all.
        cores_per_worker: Cores and threads of each, at least 1.

    Returns:
        The script, which ends in a line break.

    Raises:
        ValueError: If a number is below 1 or the command is empty.

    Example:
        >>> print(slurm_script(2, ["python", "-m", "tfpar.train"], 4).splitlines()[0])
        #!/bin/bash
    """
    _check(num_workers, command, cores_per_worker)
    return f"""#!/bin/bash
# Submit with sbatch, in the environment to train in, from a folder that all nodes see: its runs/ has the checkpoints.

#SBATCH --job-name=tfpar
#SBATCH --ntasks={num_workers}
#SBATCH --cpus-per-task={cores_per_worker}
# On GPU nodes, one a worker (remove one #):
##SBATCH --gpus-per-task=1
# FILL IN: a time that your partition allows. When it is over, the job saves and goes on in a new turn.
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{STOP_SECONDS}
#SBATCH --requeue
#SBATCH --output=tfpar-%j.log
#SBATCH --open-mode=append

{_lines(f"export {name}={cores_per_worker}" for name in THREAD_SETTINGS)}
# The workers prove with it that they belong to this job. It is on no command line, and new in each turn.
export {job_secret.VARIABLE}="$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')"
# TensorFlow's own ports, {_FIRST_PORT} to {_LAST_PORT}, have no authentication: whoever connects acts as you. Let
# only the compute nodes reach them, for example with this rule on each:
#   nft add rule inet filter input tcp dport {_FIRST_PORT}-{_LAST_PORT} ip saddr != 10.0.0.0/16 drop

# tfpar reads the addresses of all workers from the variables of srun, which must number the tasks node by node.
srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task={cores_per_worker} --label \\
    {shlex.join(command)}
code=$?

# 130: asked to stop, all workers have saved. Any other code is the result, or an error that would come again.
if [ "$code" -eq 130 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_TURNS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def tfjob_manifest(num_workers: int, command: Sequence[str], cores_per_worker: int) -> str:
    """Return a manifest for `kubectl apply`: a TFJob of Kubeflow's training operator, and who may connect to its pods.

    The chief has a replica type of its own because it alone reads and writes the run's folder: a volume that only one
    node can mount is enough. A failed or evicted worker's peers fail too, and all containers start again.

    Args:
        num_workers: How many workers, the chief included, at least 1.
        command: The command line of a worker, word by word; the same for all.
        cores_per_worker: Cores and threads of each, at least 1.

    Returns:
        The YAML, which ends in a line break.

    Raises:
        ValueError: If a number is below 1 or the command is empty.

    Example:
        >>> [line for line in tfjob_manifest(2, ["python", "-m", "tfpar.train"], 4).splitlines() if "kind" in line]
        ['kind: NetworkPolicy', 'kind: TFJob']
    """
    _check(num_workers, command, cores_per_worker)
    pod = _pod(command, cores_per_worker)
    workers = f"    Worker:\n{_replicas(num_workers - 1)}{pod}" if num_workers > 1 else ""
    return f"""\
# Submit with: kubectl apply -f THIS_FILE. Lines marked FILL IN depend on your cluster. Before the first time, make the
# secret with which the workers prove that they belong together:
#   openssl rand -hex 32 | kubectl create secret generic tfpar-job --from-file=secret=/dev/stdin
---
# TensorFlow's port has no authentication: whoever connects acts as the job. Only its own pods may, where the cluster's
# network plugin enforces policies; make sure that it does.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: tfpar
spec:
  podSelector:
    matchLabels: {{training.kubeflow.org/job-name: tfpar}}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{training.kubeflow.org/job-name: tfpar}}
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
{_replicas(1)}{pod}{_RUNS_FOLDER}{workers}"""


# Only the chief's: appended to the container, the last entry of its pod, and to the pod itself.
_RUNS_FOLDER = """\
              volumeMounts:
                # The command's --directory must lie here, or a pod that moves to another node starts from nothing.
                - name: runs
                  mountPath: /runs  # FILL IN
          volumes:
            - name: runs
              persistentVolumeClaim:
                claimName: tfpar-runs  # FILL IN
"""


def _replicas(count: int) -> str:
    return f"      replicas: {count}\n      restartPolicy: OnFailure\n"


def _pod(command: Sequence[str], cores: int) -> str:
    # Kubernetes replaces $(NAME) in a command by a variable, and writes $$( for a plain one.
    words = (json.dumps(word.replace("$(", "$$("), ensure_ascii=False) for word in command)
    return f"""\
      template:
        metadata:
          annotations:
            # A service mesh would stand between the workers.
            sidecar.istio.io/inject: "false"
        spec:
          terminationGracePeriodSeconds: {STOP_SECONDS}
          containers:
            - name: tensorflow  # the operator looks for this name
              image: your-registry/tfpar:latest  # FILL IN: has tfpar, your trainer and its configuration
              command:
{_lines(f"                - {word}" for word in words)}\
              env:
{_lines(f'                - {{name: {name}, value: "{cores}"}}' for name in THREAD_SETTINGS)}\
                - name: {job_secret.VARIABLE}
                  valueFrom: {{secretKeyRef: {{name: tfpar-job, key: secret}}}}
              resources:
                requests: {{cpu: "{cores}", memory: 4Gi}}  # FILL IN the memory
                limits: {{cpu: "{cores}", memory: 4Gi}}  # FILL IN; for a GPU add nvidia.com/gpu: "1"
"""


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _check(num_workers: int, command: Sequence[str], cores_per_worker: int) -> None:
    for name, value in (("num_workers", num_workers), ("cores_per_worker", cores_per_worker)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, received {value}. A job needs one worker with one core.")
    if not command:
        raise ValueError(
            "command must have the words that run a worker, received none. Try ['python', '-m', 'tfpar.train']."
        )

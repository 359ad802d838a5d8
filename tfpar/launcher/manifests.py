"""Templates that start a job on a cluster: a Slurm batch script and a Kubernetes TFJob manifest.

`python -m tfpar.launch --print slurm|tfjob` prints them for the user to complete. Both systems stop workers with
SIGTERM: all workers save at the same step, and the next start resumes from that checkpoint.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence

from tfpar.cluster import job_secret, slurm
from tfpar.launcher.worker import THREAD_SETTINGS

# Between SIGTERM and SIGKILL: time to finish the step and write the checkpoint of a large model.
STOP_SECONDS = 120
RESTARTS_A_WORKER = 10
MAX_TURNS = 100  # requeues of a Slurm job: srun reports the highest exit code only, so 130 can hide an error
_FIRST_PORT = slurm.FIRST_PORT
_LAST_PORT = slurm.FIRST_PORT + slurm.PORTS_A_STEP * slurm.NUM_SLOTS - 1


def slurm_script(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int = 0) -> str:
    """Return a batch script for `sbatch`, with one task per worker.

    After preemption, a timeout or the loss of a node, the job is requeued and resumes from its last checkpoint. It is
    not requeued after a failure, which would recur.

    Args:
        num_workers: Number of workers, at least 1.
        command: The command line of every worker, as words.
        cores_per_worker: Number of cores and threads per worker, at least 1.
        gpus_per_worker: Number of GPUs per worker.

    Raises:
        ValueError: If a number is below 1 or the command is empty.

    Example:
        >>> print(slurm_script(2, ["python", "-m", "tfpar.train"], 4).splitlines()[0])
        #!/bin/bash
    """
    _check(num_workers, command, cores_per_worker, gpus_per_worker)
    gpus = f"--gpus-per-task={gpus_per_worker}"
    directive = f"#SBATCH {gpus}" if gpus_per_worker else "# For GPU nodes, print this script with --gpus_per_worker."
    srun_option = f" {gpus}" if gpus_per_worker else ""
    return f"""#!/bin/bash
# Submit with sbatch, in the environment to train in, from a folder that all nodes see: its runs/ has the checkpoints.

#SBATCH --job-name=tfpar
#SBATCH --ntasks={num_workers}
#SBATCH --cpus-per-task={cores_per_worker}
{directive}
# FILL IN: a time limit that your partition allows. At its end the job saves, is requeued and resumes.
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{STOP_SECONDS}
#SBATCH --requeue
#SBATCH --output=tfpar-%j.log
#SBATCH --open-mode=append

{_lines(f"export {name}={cores_per_worker}" for name in THREAD_SETTINGS)}
# With this secret the workers authenticate each other. It is on no command line, and new at each start.
export {job_secret.VARIABLE}="$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')"
# TensorFlow's ports, {_FIRST_PORT} to {_LAST_PORT}, have no authentication: a program that connects can act as you.
# Make them reachable from the compute nodes only, for example with this rule on each node:
#   nft add rule inet filter input tcp dport {_FIRST_PORT}-{_LAST_PORT} ip saddr != 10.0.0.0/16 drop

# tfpar reads the addresses of all workers from the variables of srun, which must number the tasks node by node.
srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task={cores_per_worker}{srun_option} --label \\
    {shlex.join(command)}
code=$?

# 130: the job was interrupted, and all workers have saved. Any other code is success, or an error that would recur.
if [ "$code" -eq 130 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_TURNS} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def tfjob_manifest(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int = 0) -> str:
    """Return a manifest for `kubectl apply`: a TFJob of Kubeflow's training operator and its network policy.

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
    _check(num_workers, command, cores_per_worker, gpus_per_worker)
    pod = _pod(command, cores_per_worker, gpus_per_worker)
    workers = f"    Worker:\n{_replicas(num_workers - 1)}{pod}" if num_workers > 1 else ""
    return f"""\
# Submit with: kubectl apply -f THIS_FILE. Lines marked FILL IN depend on your cluster. Before the first time, create
# the secret with which the workers authenticate each other:
#   openssl rand -hex 32 | kubectl create secret generic tfpar-job --from-file=secret=/dev/stdin
---
# TensorFlow's port has no authentication: a program that connects can act as the job. This policy admits the job's own
# pods only, if the cluster's network plugin enforces policies; make sure that it does.
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


# For the chief only: appended to the container, the last entry of its pod, and to the pod itself.
_RUNS_FOLDER = """\
              volumeMounts:
                # The command's --directory must be in this volume, or a pod on another node finds no checkpoint.
                - name: runs
                  mountPath: /runs  # FILL IN
          volumes:
            - name: runs
              persistentVolumeClaim:
                claimName: tfpar-runs  # FILL IN
"""


def _replicas(count: int) -> str:
    return f"      replicas: {count}\n      restartPolicy: OnFailure\n"


def _pod(command: Sequence[str], cores: int, gpus: int) -> str:
    # Kubernetes requires GPU requests to equal GPU limits.
    limit = (
        f', nvidia.com/gpu: "{gpus}"}}  # FILL IN the memory' if gpus else "}  # FILL IN; --gpus_per_worker adds GPUs"
    )
    # Kubernetes expands $(NAME) in commands; $$( is a literal $(.
    words = (json.dumps(word.replace("$(", "$$("), ensure_ascii=False) for word in command)
    return f"""\
      template:
        metadata:
          annotations:
            # A service mesh would intercept the connections between the workers.
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
                limits: {{cpu: "{cores}", memory: 4Gi{limit}
"""


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _check(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int) -> None:
    for name, value in (("num_workers", num_workers), ("cores_per_worker", cores_per_worker)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, received {value}. A job needs one worker with one core.")
    if gpus_per_worker < 0:
        raise ValueError(f"gpus_per_worker must be at least 0, received {gpus_per_worker}. Leave it out without GPUs.")
    if not command:
        raise ValueError(
            "command must have the words that run a worker, received none. Try ['python', '-m', 'tfpar.train']."
        )

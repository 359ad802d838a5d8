"""The container of a worker in YAML, and the policy of who may connect to it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from tfpar.cluster import job_secret
from tfpar.launcher.worker import THREAD_SETTINGS

# Between SIGTERM and SIGKILL: time to finish the step and write the checkpoint of a large model.
STOP_SECONDS = 120
INSTRUCTIONS = """\
# Submit with: kubectl apply -f THIS_FILE. Lines marked FILL IN depend on your cluster. Before the first time, create
# the secret with which the workers authenticate each other:
#   openssl rand -hex 32 | kubectl create secret generic tfpar-job --from-file=secret=/dev/stdin
"""
RUNS_MOUNT = """\
# The command's --directory must be in this volume, or a new pod finds no checkpoint.
- name: runs
  mountPath: /runs  # FILL IN
"""
RUNS_VOLUME = """\
- name: runs
  persistentVolumeClaim:
    claimName: tfpar-runs  # FILL IN
"""


def network_policy(job_label: str) -> str:
    """Return a NetworkPolicy that lets only the pods of the job connect to each other.

    Args:
        job_label: The label that has the name of the job on each of its pods.

    Example:
        >>> network_policy("jobset.sigs.k8s.io/jobset-name").splitlines()[3]
        'kind: NetworkPolicy'
    """
    return f"""\
# TensorFlow's port has no authentication: a program that connects can act as the job. This policy admits the job's own
# pods only, if the cluster's network plugin enforces policies; make sure that it does.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: tfpar
spec:
  podSelector:
    matchLabels: {{{job_label}: tfpar}}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{{job_label}: tfpar}}
"""


def container(name: str, command: Sequence[str], environment: str, cores: int, gpus: int) -> str:
    """Return the container of a worker, an entry of a list, to which further keys may be appended.

    Args:
        name: The name of the container.
        command: The command line, as words; empty for that of the image.
        environment: Entries of `env` that come first.
        cores: Number of cores and threads.
        gpus: Number of GPUs.

    Example:
        >>> container("node", ["python", "-m", "tfpar.train"], "", 4, 0).splitlines()[0]
        '- name: node'
    """
    threads = "".join(f'- {{name: {setting}, value: "{cores}"}}\n' for setting in THREAD_SETTINGS)
    # Kubernetes requires GPU requests to equal GPU limits.
    limit = (
        f', nvidia.com/gpu: "{gpus}"}}  # FILL IN the memory' if gpus else "}  # FILL IN; --gpus_per_worker adds GPUs"
    )
    return f"""\
- name: {name}
  image: your-registry/tfpar:latest  # FILL IN: has tfpar, your trainer and its configuration
{indented(command_lines(command), 2)}\
  env:
{indented(environment + threads, 4)}\
    - name: {job_secret.VARIABLE}
      valueFrom: {{secretKeyRef: {{name: tfpar-job, key: secret}}}}
  resources:
    requests: {{cpu: "{cores}", memory: 4Gi}}  # FILL IN the memory
    limits: {{cpu: "{cores}", memory: 4Gi{limit}
"""


def command_lines(command: Sequence[str]) -> str:
    """Return the key `command` with one line per word; nothing if there is none.

    Args:
        command: The command line, as words.

    Example:
        >>> command_lines(["echo", "$(HOME)"]).splitlines()
        ['command:', '  - "echo"', '  - "$$(HOME)"']
    """
    # Kubernetes expands $(NAME) in commands; $$( is a literal $(.
    words = [json.dumps(word.replace("$(", "$$("), ensure_ascii=False) for word in command]
    return "".join(["command:\n", *(f"  - {word}\n" for word in words)]) if words else ""


def indented(lines: str, num_spaces: int) -> str:
    """Return lines of YAML for a deeper place of the document."""
    return textwrap.indent(lines, " " * num_spaces)

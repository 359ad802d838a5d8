"""A batch script for Slurm's `sbatch`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from tfpar.cluster import job_secret, slurm
from tfpar.launcher.manifests import arguments
from tfpar.launcher.manifests.pods import STOP_SECONDS
from tfpar.launcher.worker import THREAD_SETTINGS

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
    arguments.check(num_workers, command, cores_per_worker, gpus_per_worker)
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


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)

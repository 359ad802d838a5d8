"""The GPUs of a Slurm task: either bound to it by Slurm, or shared by the tasks of its node and divided here.

srun --gpus-per-task=2     each task sees its own two: keep them
srun --gpus-per-node=4     each of two tasks sees all four: task 0 takes the first two, task 1 the others
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfpar.cluster import slurm


def share(environment: Mapping[str, str], num_visible: int) -> range | None:
    """Return the indices of this task's GPUs among the visible ones; None to keep all.

    A task keeps all GPUs if it is alone on its node, if Slurm has bound GPUs to it, if there are fewer GPUs than tasks,
    or if TF_CONFIG is set: then whatever set it divides the GPUs.

    Args:
        environment: Environment variables, such as `os.environ`.
        num_visible: Number of GPUs visible to this process.

    Raises:
        ValueError: If a variable of Slurm is missing or invalid.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        >>> share({**step, "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4"}, 4)
        range(2, 4)
    """
    is_several = "SLURM_STEP_ID" in environment and environment.get("SLURM_STEP_NUM_TASKS") != "1"
    if "TF_CONFIG" in environment or not is_several or num_visible < 2:
        return None
    tasks = slurm.expand_tasks(slurm.variable(environment, "SLURM_STEP_TASKS_PER_NODE"))
    node, task = slurm.number(environment, "SLURM_NODEID"), slurm.number(environment, "SLURM_LOCALID")
    num_tasks = tasks[node] if node < len(tasks) else 1
    if num_tasks == 1 or num_visible < num_tasks or _is_bound(environment, num_visible):
        return None
    each = num_visible // num_tasks
    return range(task * each, (task + 1) * each)


def _is_bound(environment: Mapping[str, str], num_visible: int) -> bool:
    """Return whether Slurm has given this task GPUs of its own."""
    # Slurm 22.05 sets the first to "gpu:per_task:2", "gpu:single:1" or "gpu:none".
    for name in ("SLURMD_TRES_BIND", "SLURM_GPU_BIND"):
        if environment.get(name, "none").removeprefix("gpu:").rpartition(",")[2] != "none":  # after "verbose,"
            return True
    # Slurm binds --gpus-per-task since 21.08; before, each task saw the GPUs of all tasks.
    per_task = _count(environment, "SLURM_GPUS_PER_TASK") or _count(environment, "SLURM_TRES_PER_TASK")
    return num_visible <= per_task or num_visible < _count(environment, "SLURM_GPUS_ON_NODE")


def _count(environment: Mapping[str, str], name: str) -> int:
    """Return the number of GPUs in texts such as "4", "a100:4", "gres/gpu:a100:4" and "4(S:0-1)", or 0."""
    parts = environment.get(name, "").split(",")  # such as "cpu=4,gres/gpu:2"
    text = next((part for part in parts if "gpu" in part or not {"/", "="} & set(part)), "")
    match = re.search(r"(?:^|[:=])([0-9]{1,4})(?:\(.*\))?$", text)
    return int(match[1]) if match else 0

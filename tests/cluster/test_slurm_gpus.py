"""The GPUs of a task of a Slurm job step, divided over the tasks of a node once; variables and GPUs are made up."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import made_up_gpus
from tfpar import cluster
from tfpar.cluster import tf_config
from tfpar.cluster.gpu import slurm_gpus
from tfpar.workers import preflight

# Task 3 of 4: the second of the second node.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("variables", "num_visible", "expected"),
    [
        # Each task sees the GPUs of all tasks of its node.
        ({"SLURM_GPUS_ON_NODE": "4"}, 4, range(2, 4)),
        ({"SLURM_GPUS_ON_NODE": "gpu:a100:4(S:0-1)"}, 4, range(2, 4)),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0,1,2,3", "SLURMD_TRES_BIND": "gpu:none"}, 4, range(2, 4)),
        ({}, 4, range(2, 4)),
        ({}, 5, range(2, 4)),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPU_BIND": "none"}, 2, range(1, 2)),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"}, 4, range(2, 4)),
        # Slurm has bound GPUs to each task.
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"}, 2, None),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 2, None),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:a100:2"}, 2, None),
        ({"SLURM_TRES_PER_TASK": "gres/gpu=2"}, 2, None),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/nic:2"}, 2, range(1, 2)),
        ({"SLURM_GPUS_ON_NODE": "4"}, 2, None),
        ({"SLURMD_TRES_BIND": "gpu:per_task:2"}, 2, None),
        ({"SLURM_GPU_BIND": "verbose,per_task:2"}, 4, None),
        # Nothing to divide.
        ({"SLURM_GPUS_ON_NODE": "1"}, 1, None),
        ({}, 0, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, 4, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 4, None),
        ({"TF_CONFIG": "{}"}, 4, None),
    ],
)
def test_gpus_that_all_tasks_see_are_divided_and_bound_ones_are_kept(
    variables: dict[str, str], num_visible: int, expected: range | None
) -> None:
    assert slurm_gpus.share({**STEP, **variables}, num_visible) == expected


def test_outside_of_a_job_step_all_gpus_are_kept() -> None:
    assert slurm_gpus.share({}, 4) is None
    assert slurm_gpus.share({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, 4) is None


def form(devices: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MultiWorker form a cluster of `STEP`, up to the rendezvous of the workers."""

    def meet(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no other worker")

    monkeypatch.setattr(preflight.tf_distribute, "has_started", lambda: False)
    monkeypatch.setattr(preflight.rendezvous, "connect_workers", meet)
    with pytest.raises(ConnectionError, match="no other worker"):
        preflight.form_cluster(tf_config.from_environment(os.environ), devices, 1.0, 1.0, "MultiWorker")


@pytest.fixture(autouse=True)
def task_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is that task."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def test_a_task_trains_on_its_share_of_the_gpus_only(logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = made_up_gpus.install(monkeypatch, [1, 1, 1, 1])
    import tensorflow as tf

    form(None, monkeypatch)
    assert tf.config.get_visible_devices("GPU") == gpus[2:]
    assert cluster.configured_devices(None) == ["GPU:0", "GPU:1"]


def test_gpus_that_the_user_has_named_are_not_divided(logical_cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = made_up_gpus.install(monkeypatch, [1, 1, 1, 1])
    import tensorflow as tf

    form(["GPU:0"], monkeypatch)
    assert tf.config.get_visible_devices("GPU") == gpus
    tf.config.set_visible_devices(gpus[1:], "GPU")
    form(None, monkeypatch)
    assert tf.config.get_visible_devices("GPU") == gpus[1:]

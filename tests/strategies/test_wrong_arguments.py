"""What a strategy cannot train with is refused when it is created, with the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

import tfpar

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]


def stages(**settings: Any) -> tfpar.Pipeline:
    return tfpar.Pipeline(2, 2, **settings)


def grid(num_replicas: Any = 2, **settings: Any) -> tfpar.Hybrid:
    return tfpar.Hybrid(stages(), num_replicas, **settings)


def shards(num_replicas: Any = 2, **settings: Any) -> tfpar.Hybrid:
    return tfpar.Hybrid(tfpar.TensorParallel(2), num_replicas, **settings)


# What is created, its arguments, and what the error says of them.
WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (tfpar.SingleDevice, {"device": "TPU:0"}, "devices of this machine, received ['TPU:0']. There are:"),
    (tfpar.Mirrored, {"devices": ["CPU:0", "CPU:7"]}, "of this machine, received ['CPU:0', 'CPU:7']. There are:"),
    (tfpar.Mirrored, {"devices": ["CPU:0", "/device:CPU:0"]}, "must name different devices"),
    (tfpar.Mirrored, {"devices": []}, "must name at least one device, received []"),
    (tfpar.Mirrored, {"devices": TWO, "all_reduce": "nccl"}, "all_reduce='nccl' needs GPUs, and the devices are ['C"),
    (tfpar.Mirrored, {"devices": TWO, "all_reduce": "ring"}, "all_reduce must be 'auto', "),
    (tfpar.Mirrored, {"devices": TWO, "pack_bytes": 0}, "pack_bytes must be at least 1, received 0"),
    (
        tfpar.Mirrored,
        {"batch_dependent_layers": "allow"},
        "batch_dependent_layers must be 'refuse' or 'gather', received 'allow'",
    ),
    (tfpar.Mirrored, {"shard": "gradients"}, "shard must be 'optimizer', 'weights' or None, received 'gradients'"),
    (tfpar.Mirrored, {"shard": "optimizer", "pack_bytes": 100}, "and pack_bytes=100 would have no effect. Leave it"),
    (
        tfpar.Mirrored,
        {"shard": "optimizer", "all_reduce": "nccl", "pack_bytes": 8},
        "all_reduce='nccl' and pack_bytes=8 would have no effect. Leave them out",
    ),
    (
        tfpar.Mirrored,
        {"shard": "weights", "pack_bytes": 100},
        "pack_bytes is for replicas with whole weights",
    ),
    (
        tfpar.Mirrored,
        {"shard": "weights", "batch_dependent_layers": "gather"},
        "batch_dependent_layers is for replicas with whole weights",
    ),
    (tfpar.Mirrored, {"devices": TWO, "batch_shares": [3]}, "a number for each of 2 devices, received [3]. Leave it"),
    (
        tfpar.Mirrored,
        {"devices": TWO, "batch_shares": [1.5, 1]},
        "received [1.5, 1]. Write [3, 2] where a device",
    ),
    (
        tfpar.Mirrored,
        {"devices": TWO, "batch_shares": [1, 0]},
        "must be whole numbers from 1 to 1,000,000, ",
    ),
    (
        tfpar.Mirrored,
        {"devices": TWO, "shard": "weights", "batch_shares": [3, 1]},
        "batch_shares is for replicas with whole weights, received batch_shares=[3, 1] with shard='weights'",
    ),
    (
        tfpar.MultiWorker,
        {"sync": "average", "batch_shares": [3, 1]},
        "whatever the size of its per-replica batch, received batch_shares=[3, 1]",
    ),
    (
        tfpar.Mirrored,
        {"devices": TWO, "own_steps": "average", "batch_shares": [3, 1]},
        'own_steps="average" gives every replica the same weight',
    ),
    (tfpar.MultiWorker, {"devices": TWO, "batch_shares": [1, 2, 3]}, "each of 2 devices, received [1, 2, 3]. Leave it"),
    (tfpar.MultiWorker, {"all_reduce": "tree"}, "all_reduce must be 'auto', 'ring' or 'nccl', received 'tree'"),
    (tfpar.MultiWorker, {"all_reduce": "nccl"}, "all_reduce='nccl' needs GPUs"),
    (tfpar.MultiWorker, {"pack_bytes": 0}, "pack_bytes must be at least 1, received 0"),
    (tfpar.MultiWorker, {"compression": "float8"}, "compression must be None or 'bfloat16', received 'float8'"),
    (tfpar.MultiWorker, {"form_seconds": 0}, "both at most 604800 (a week), received 0 and 30.0"),
    (tfpar.MultiWorker, {"form_seconds": math.nan}, "both at most 604800 (a week), received nan and 30.0"),
    (tfpar.MultiWorker, {"silence_seconds": 0.5}, "must be above 0 and silence_seconds at least 1, both at most"),
    (tfpar.MultiWorker, {"sync": "never"}, "sync must be 'step' or 'average', received 'never'"),
    (tfpar.MultiWorker, {"sync": "average", "every": 0}, "every must be at least 1, received 0"),
    (tfpar.MultiWorker, {"every": 2}, "every and average_optimizer belong to sync='average', received every=2"),
    (tfpar.MultiWorker, {"average_optimizer": False}, "average_optimizer=False with sync='step'. Set sync='average'"),
    (
        tfpar.MultiWorker,
        {"sync": "average", "compression": "bfloat16"},
        "compression rounds gradients, and sync='average' sends none",
    ),
    (
        tfpar.MultiWorker,
        {"shard": "weights", "compression": "bfloat16"},
        "compression is for replicas with whole weights, received compression='bfloat16'",
    ),
    (
        tfpar.MultiWorker,
        {"shard": "weights", "sync": "average", "every": 4},
        "With sync='average' every replica updates its own weights",
    ),
    (tfpar.MultiWorker, {"devices": ["CPU:7"]}, "must name different devices of this machine, received ['CPU:7']"),
    (tfpar.TensorParallel, {"num_shards": True}, "at least 2, received True"),
    (tfpar.TensorParallel, {"num_shards": 9}, "num_shards=9 needs 9 devices, and there are 4"),
    (tfpar.TensorParallel, {"num_shards": 2, "devices": ["CPU:0"]}, "received num_shards=2 and 1 devices"),
    (tfpar.TensorParallel, {"num_shards": 2, "devices": ["CPU:0", "CPU:7"]}, "CPU:7"),
    (stages, {"num_shards": 0}, "num_shards must be a whole number of at least 1, received 0"),
    (stages, {"num_shards": 3}, "2 stages of 3 shards under '1f1b' need 6 devices, and there are 4"),
    (
        stages,
        {"num_shards": 2, "devices": [*TWO, "CPU:2"]},
        "Each stage needs num_shards=2 devices, received 3",
    ),
    (stages, {"num_shards": 2, "memory_limit_bytes": 1}, "memory_limit_bytes is for stages on one device each"),
    (stages, {"num_shards": 2, "across_workers": True}, "across_workers is for stages on one device each"),
    (
        stages,
        {"layout": {"kernel": (None, "model")}},
        "layout divides the weights of a stage over its devices",
    ),
    (
        stages,
        {"num_shards": 2, "layout": {"kernel": (1, "model")}},
        'A rule of layout names at most one axis "model"',
    ),
    (grid, {"num_replicas": True}, "num_replicas must be a whole number of at least 1, received True"),
    (grid, {"num_replicas": 0}, "num_replicas must be a whole number of at least 1, received 0"),
    (
        grid,
        {"num_replicas": 4},
        "8 in all, received 4: ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']. Grids that fit are 4 x 1, 2 x 2",
    ),
    (grid, {"devices": TWO}, "4 in all, received 2: ['CPU:0', 'CPU:1']"),
    (grid, {"shard": "weights"}, "shard must be 'optimizer' or None, received 'weights'"),
    (
        lambda: tfpar.Hybrid(stages(devices=TWO), 2),
        {},
        "Leave them out there, and give devices to Hybrid",
    ),
    (lambda: tfpar.Hybrid(stages(num_shards=2), 2), {}, "a device for each of 2 replicas x 4 devices of the pipeline"),
    (shards, {"num_replicas": 0}, "num_replicas must be a whole number of at least 1, received 0"),
    (shards, {"num_replicas": 3}, "a device for each of 3 replicas x 2 devices of the pipeline, 6 in all, received 4"),
    (shards, {"devices": TWO}, "a device for each of 2 replicas x 2 devices of the pipeline, 4 in all, received 2"),
    (shards, {"shard": "weights"}, "shard must be 'optimizer' or None, received 'weights'"),
]


@pytest.mark.parametrize(("create", "arguments", "message"), WRONG)
def test_arguments_that_a_strategy_cannot_train_with_are_refused(
    create: Callable[..., Any], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        create(**arguments)


def test_another_strategy_has_no_replicas() -> None:
    with pytest.raises(TypeError, match=r"pipeline must be a tfpar.Pipeline or tfpar.TensorParallel, received .*Mirr"):
        tfpar.Hybrid(tfpar.Mirrored(["CPU:0"]), 2)  # type: ignore[arg-type]

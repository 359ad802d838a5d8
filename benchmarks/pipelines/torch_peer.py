"""PyTorch for comparison, on gloo, with one core and one thread a process.

`torch.distributed.pipelining` has a process per stage, `fully_shard` (FSDP2) a process per part of the batch: the
weights of each block are one group, as in PyTorch's tutorial.

    python -m benchmarks.pipelines.torch_peer '{"setting": {…}, "rank": 0, "addresses": ["127.0.0.1:1234"]}'

The loop is the plain one of PyTorch's tutorials, without metrics, and the batch is a tensor in memory: both in
PyTorch's favour. No TensorFlow in this process.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from benchmarks import peers, process
from benchmarks.pipelines.examples import (
    HIDDEN_WIDTH,
    LEARNING_RATE,
    MLP_WIDTH,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_LAYERS,
    WIDTH,
    arrays,
)
from benchmarks.pipelines.setting import Setting

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}


def run_here(setting: Setting, rank: int, addresses: list[str]) -> dict[str, Any]:
    """Train this process' stage, or its part of the batch, in laps.

    Args:
        setting: What to train; with `num_stages=1` the whole batch at once, without a pipeline.
        rank: Which process this is.
        addresses: Of all processes; they meet at the first.

    Returns:
        `lap_seconds` and `lap_processor_seconds` for a step, one of each lap, and `num_parameters` of this process.
    """
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
    torch = peers.load("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if addresses:
        _connect(torch, rank, addresses)
    if setting.trainer == "torch_sharded":
        stage = _sharded(torch, replace(setting, num_stages=1))
        forward_backward = _whole(torch, stage, setting, rank, setting.num_devices)
    else:
        stage = _stage(torch, setting, rank)
        forward_backward = _pipeline(torch, stage, setting, rank) if addresses else _whole(torch, stage, setting)
    optimizer = torch.optim.SGD(stage.parameters(), LEARNING_RATE)
    laps = []
    for _ in range(1 + setting.num_laps):
        began, processor_began = time.perf_counter(), time.process_time()
        for _ in range(setting.steps_per_lap):
            optimizer.zero_grad()
            forward_backward()
            optimizer.step()
        laps.append((time.perf_counter() - began, time.process_time() - processor_began))
    if addresses:
        torch.distributed.barrier()
    return {
        "lap_seconds": [seconds / setting.steps_per_lap for seconds, _ in laps[1:]],
        "lap_processor_seconds": [seconds / setting.steps_per_lap for _, seconds in laps[1:]],
        "num_parameters": sum(_num_held(parameter) for parameter in stage.parameters()),
    }


def _num_held(parameter: Any) -> int:
    """Return the number of elements of a parameter that this process holds."""
    held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(held.numel())


def _connect(torch: Any, rank: int, addresses: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )


def _sharded(torch: Any, setting: Setting) -> Any:
    """Return the whole model, each process with its share of each block's weights."""
    fsdp = peers.load("torch", "torch.distributed.fsdp")
    mesh = peers.load("torch", "torch.distributed.device_mesh").init_device_mesh("cpu", (setting.num_devices,))
    model = _stage(torch, setting, 0)
    for block in model:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def _pipeline(torch: Any, module: Any, setting: Setting, rank: int) -> Any:
    pipelining = peers.load("torch", "torch.distributed.pipelining")
    stage = pipelining.PipelineStage(module, rank, setting.num_stages, torch.device("cpu"))
    make_schedule = getattr(pipelining, SCHEDULES[setting.schedule])
    schedule = make_schedule(stage, setting.num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    inputs, targets = (torch.from_numpy(array) for array in arrays(setting.workload, setting.batch_size))
    given: tuple[Any, ...] = (inputs,) if rank == 0 else ()
    wanted = {"target": targets} if rank == setting.num_stages - 1 else {}
    return lambda: schedule.step(*given, **wanted, return_outputs=False)


def _whole(torch: Any, module: Any, setting: Setting, rank: int = 0, num_parts: int = 1) -> Any:
    inputs, targets = (
        torch.from_numpy(array).chunk(num_parts)[rank] for array in arrays(setting.workload, setting.batch_size)
    )
    return lambda: torch.nn.functional.mse_loss(module(inputs), targets).backward()


def _stage(torch: Any, setting: Setting, rank: int) -> Any:
    """Return this stage's share of the layers: as many on each stage, which is the even cut of both models."""
    nn = torch.nn
    if setting.workload == "mlp":
        layers = [nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    else:
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, NUM_HEADS, HIDDEN_WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(NUM_BLOCKS)
        ]
    share = len(layers) // setting.num_stages
    return nn.Sequential(*layers[rank * share : (rank + 1) * share])


if __name__ == "__main__":
    received = process.request()
    process.reply(run_here(Setting(**received["setting"]), received["rank"], received["addresses"]))
    os._exit(0)  # as benchmarks.worker: PyTorch sometimes aborts on its way out

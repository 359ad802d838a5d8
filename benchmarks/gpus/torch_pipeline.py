"""`torch.distributed.pipelining` for comparison on GPUs: one process for each stage, on NCCL. No TensorFlow here.

As in `benchmarks.gpus.torch_peer`, the loop is the plain one of PyTorch's tutorials, without metrics.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks import peers, process
from benchmarks.gpus.examples import LEARNING_RATE, arrays
from benchmarks.gpus.setting import GpuSetting
from benchmarks.gpus.torch_peer import MODELS, in_host_memory, laps, start


def run_here(setting: GpuSetting, rank: int, addresses: list[str]) -> dict[str, float]:
    """Train this process' stage by the schedule 1F1B, in laps.

    Args:
        setting: What to train.
        rank: Which device of the setting, and which stage, this process has.
        addresses: Of all processes; they connect at the first.
    """
    torch, device = start(setting, rank, addresses)
    pipelining = peers.load("torch", "torch.distributed.pipelining")
    number = len(setting.devices)
    module = torch.nn.Sequential(*share(list(MODELS[setting.workload](torch)), rank, number)).to(device)
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=0.9)
    stage = pipelining.PipelineStage(module, rank, number, device)
    schedule = pipelining.Schedule1F1B(stage, setting.num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    inputs, targets = (in_host_memory(torch, array, device) for array in arrays(setting.workload, setting.batch_size))

    def step() -> None:
        given = (inputs.to(device, non_blocking=True),) if rank == 0 else ()
        wanted = {"target": targets.to(device, non_blocking=True)} if rank == number - 1 else {}
        optimizer.zero_grad()
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()

    found = laps(torch, step, device, setting)
    torch.distributed.barrier()
    return found


def share(layers: list[Any], stage: int, num_stages: int) -> list[Any]:
    """Return the layers of one stage: consecutive ones, as many on each stage as on any other, or one more.

    Example:
        >>> [share([1, 2, 3, 4, 5], stage, 2) for stage in range(2)]
        [[1, 2], [3, 4, 5]]
    """
    first, last = (len(layers) * number // num_stages for number in (stage, stage + 1))
    return layers[first:last]


if __name__ == "__main__":
    received = process.request()
    setting = GpuSetting(**received["setting"] | {"devices": tuple(received["setting"]["devices"])})
    process.reply(run_here(setting, received["rank"], received["addresses"]))
    os._exit(0)  # as benchmarks.worker: PyTorch sometimes aborts on its way out

"""`torch.distributed.pipelining` for comparison on GPUs: one process for each stage, on NCCL. No TensorFlow here.

As in `benchmarks.gpus.torch_peer`, the loop is the plain one of PyTorch's tutorials, without metrics.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from benchmarks import peers
from benchmarks.gpus.examples import LEARNING_RATE, arrays
from benchmarks.gpus.setting import GpuSetting
from benchmarks.gpus.torch_peer import in_host_memory, laps, layers_of, precision_of, start
from benchmarks.gpus.turn import received, serve
from benchmarks.harness import Output


def run_here(torch: Any, device: Any, rank: int, setting: GpuSetting) -> Output:
    """Train this process' stage by the schedule 1F1B, in laps.

    Args:
        torch: PyTorch.
        device: The device of this process.
        rank: Which device of the setting, and which stage, this process has.
        setting: What to train.
    """
    torch.manual_seed(0)
    pipelining = peers.load("torch", "torch.distributed.pipelining")
    number = len(setting.devices)
    inputs, targets = (in_host_memory(torch, array, device) for array in arrays(setting.workload, setting.batch_size))

    def made() -> Callable[[], None]:
        module = torch.nn.Sequential(*share(list(layers_of(torch, setting.workload)), rank, number)).to(device)
        optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=0.9)
        stage = pipelining.PipelineStage(module, rank, number, device)
        schedule = pipelining.Schedule1F1B(stage, setting.num_microbatches, loss_fn=torch.nn.functional.mse_loss)

        def step() -> None:
            given = (inputs.to(device, non_blocking=True),) if rank == 0 else ()
            wanted = {"target": targets.to(device, non_blocking=True)} if rank == number - 1 else {}
            optimizer.zero_grad()
            with precision_of(torch, device, setting):
                schedule.step(*given, **wanted, return_outputs=False)
            optimizer.step()

        return step

    found = laps(torch, made, device, setting)
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
    given, own_rank, hosts = received()
    torch_here, own_device = start(given[0], own_rank, hosts)
    serve(given, functools.partial(run_here, torch_here, own_device, own_rank))
    os._exit(0)  # as benchmarks.worker: PyTorch sometimes aborts on its way out

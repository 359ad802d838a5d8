"""PyTorch for comparison: the same models, DistributedDataParallel on gloo, one thread. No TensorFlow in this process.

The loop is the plain one of PyTorch's tutorials without metrics, and batches are cut from arrays in memory at no cost:
both in PyTorch's favour. DDP's own hook for bfloat16 gradients refuses gloo ("required CUDA 11+ and NCCL 2.10+").
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from benchmarks import network, peers
from benchmarks.examples import ARRAYS, NUM_CLASSES, WIDTH
from benchmarks.measurement import Measurement, Timing

_IMAGES = ("cnn", "resnet20")


def train(measurement: Measurement, rank: int, addresses: list[str]) -> Timing:
    """Train the warm-up, then time the steps.

    Args:
        measurement: What to train.
        rank: Which worker this is.
        addresses: The addresses of all workers; they connect at the first. Empty for a single process.
    """
    torch = peers.load("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(torch, measurement.workload)
    if addresses:
        model = _distributed(torch, model, measurement, rank, addresses[0])
    inputs, targets = _share(torch, measurement, rank)
    loss_of = torch.nn.functional.cross_entropy if measurement.workload in _IMAGES else torch.nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9 if measurement.workload == "resnet20" else 0.0)

    def run(num_steps: int) -> Timing:
        began, processor_began = time.perf_counter(), time.process_time()
        for rows, wanted in zip(inputs[:num_steps], targets[:num_steps], strict=True):
            optimizer.zero_grad()
            loss_of(model(rows), wanted).backward()
            optimizer.step()
        return Timing(time.perf_counter() - began, 0.0, time.process_time() - processor_began)

    run(measurement.num_warm_up_steps)
    timing = run(measurement.num_steps)
    if addresses:
        torch.distributed.barrier()
    return timing


def _model(torch: Any, workload: str) -> Any:
    nn = torch.nn
    if workload == "resnet20":
        # As the images are, and the faster order for convolutions on a CPU.
        return _resnet20(torch).to(memory_format=torch.channels_last)
    if workload == "dense":
        hidden = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH))
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))


def _resnet20(torch: Any) -> Any:
    nn = torch.nn

    def normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
        return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs, eps=1e-3)]

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self, inputs: int, width: int) -> None:
            super().__init__()
            stride = width // inputs
            self.inside = nn.Sequential(
                *normalized(inputs, width, 3, stride), nn.ReLU(inplace=True), *normalized(width, width, 3)
            )
            self.around = nn.Sequential(*(normalized(inputs, width, 1, stride) if stride > 1 else ()))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inside(x) + self.around(x))

    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]  # before and after each block
    blocks = [Block(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    stem = [*normalized(3, 16, 3), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES))


def _distributed(torch: Any, model: Any, measurement: Measurement, rank: int, address: str) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if measurement.rate is None else network.INTERFACE
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=measurement.num_workers
    )
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _share(torch: Any, measurement: Measurement, rank: int) -> tuple[Any, Any]:
    """Return this worker's share of every global batch, `[steps, share, ...]` each."""
    share = measurement.batch_size // measurement.num_workers
    arrays = ARRAYS[measurement.workload](measurement.num_steps * measurement.batch_size)
    batches = [array.reshape(measurement.num_steps, measurement.batch_size, *array.shape[1:]) for array in arrays]
    inputs, targets = (torch.from_numpy(batch[:, rank * share : (rank + 1) * share].copy()) for batch in batches)
    # PyTorch's images are [channels, height, width]. With one channel that is another shape for the same numbers; with
    # three, the strides say that the channels come last in memory.
    if measurement.workload == "cnn":
        inputs = inputs.reshape(*inputs.shape[:2], 1, 28, 28)
    elif measurement.workload == "resnet20":
        inputs = inputs.permute(0, 1, 4, 2, 3)
    return inputs, targets

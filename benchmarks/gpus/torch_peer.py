"""PyTorch for comparison on GPUs: the same models, one process for each device, on NCCL. No TensorFlow here.

The loop is the plain one of PyTorch's tutorials, without metrics. float32 products run in TensorFloat-32, as they do in
TensorFlow by default; each batch is copied from pinned memory while the previous step runs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.gpus.examples import LEARNING_RATE, NUM_CLASSES, TRANSFORMERS, arrays
from benchmarks.gpus.setting import GpuSetting
from benchmarks.gpus.turn import figures, received, serve
from benchmarks.harness import Output


def start(setting: GpuSetting, rank: int, addresses: list[str]) -> tuple[Any, Any]:
    """Return PyTorch and the device of this process, connected to the other processes.

    Args:
        setting: Any of this process.
        rank: Which device of the setting this process has.
        addresses: Of all processes, empty for one; they connect at the first.
    """
    torch = peers.load("torch")
    on_gpu = setting.devices[rank].startswith("GPU")
    device = torch.device("cuda", int(setting.devices[rank].partition(":")[2])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        # As in benchmarks.gpus.worker, loading libraries is no part of a first step.
        torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device=device), torch.ones(3, 8, 3, 3, device=device))
        torch.cuda.synchronize()
    else:
        torch.set_num_threads(1)  # CPUs in place of GPUs, for tests: its threads would wait for each other on few cores
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if addresses:
        backend, world_size = "nccl" if on_gpu else "gloo", len(addresses)
        address = f"tcp://{addresses[0]}"
        torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    return torch, device


def run_here(torch: Any, device: Any, setting: GpuSetting) -> Output:
    """Train this process' share of every global batch, in laps.

    Args:
        torch: PyTorch.
        device: The device of this process.
        setting: What to train.
    """
    torch.manual_seed(0)
    if setting.jit_compile is True:
        torch.compiler.reset()  # of the settings before
    share = setting.batch_size // len(setting.devices)
    host = [in_host_memory(torch, array, device) for array in arrays(setting.workload, share)]
    loss_of = torch.nn.functional.cross_entropy if setting.workload == "resnet50" else torch.nn.functional.mse_loss

    def made() -> Callable[[], None]:
        model = layers_of(torch, setting.workload).to(device)
        if setting.workload == "resnet50":
            model = model.to(memory_format=torch.channels_last)  # as the images are
        if len(setting.devices) > 1:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model = torch.compile(model) if setting.jit_compile is True else model
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)

        def step() -> None:
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in host)
            optimizer.zero_grad()
            with precision_of(torch, device, setting):
                loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()

        return step

    return laps(torch, made, device, setting)


def precision_of(torch: Any, device: Any, setting: GpuSetting) -> Any:
    """Return the context of a forward pass: mixed precision by `torch.autocast`, or none."""
    return torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "mixed_bfloat16")


def in_host_memory(torch: Any, array: np.ndarray, device: Any) -> Any:
    """Return an array as a tensor of the host, from which it can be copied to a GPU while that computes."""
    tensor = torch.from_numpy(array.copy())
    return tensor if device.type == "cpu" else tensor.pin_memory()


def laps(torch: Any, made: Callable[[], Callable[[], None]], device: Any, setting: GpuSetting) -> Output:
    """Return the figures of a process that repeats a step.

    Args:
        torch: PyTorch.
        made: Builds the model and returns what runs one step.
        device: The device of this process.
        setting: What to train.
    """
    on_cpu, moments = device.type == "cpu", list[float]()
    wait: Callable[[], None] = (lambda: None) if on_cpu else torch.cuda.synchronize
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    before = 0 if on_cpu else torch.cuda.memory_allocated()
    began = time.perf_counter()
    step = made()
    step()
    wait()
    first_step_seconds = time.perf_counter() - began
    for _ in range(1 + setting.num_laps):
        moments.append(time.perf_counter())
        for _ in range(setting.steps_per_lap):
            step()
        wait()
        moments.append(time.perf_counter())
    peak = {} if on_cpu else {"peak_bytes": torch.cuda.max_memory_allocated() - before}
    return figures(setting, first_step_seconds, moments) | peak


def layers_of(torch: Any, workload: str) -> Any:
    """Return the model of a workload as `torch.nn.Sequential`."""
    return _resnet50(torch) if workload == "resnet50" else _transformer(torch, workload)


def _resnet50(torch: Any) -> Any:
    """Return ResNet50 as Keras has it: biases in convolutions, and the stride in the first of each block.

    PyTorch's images are [channels, height, width]; the data are transposed on the device.
    """
    nn = torch.nn

    def normalized(inputs: int, outputs: int, size: int = 1, stride: int = 1) -> list[Any]:
        return [nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.BatchNorm2d(outputs, eps=1.001e-5)]

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self, inputs: int, width: int, stride: int, is_first: bool) -> None:
            super().__init__()
            first, second = normalized(inputs, width, 1, stride), normalized(width, width, 3)
            layers = [*first, nn.ReLU(), *second, nn.ReLU(), *normalized(width, 4 * width)]
            self.inside = nn.Sequential(*layers)
            self.around = nn.Sequential(*(normalized(inputs, 4 * width, 1, stride) if is_first else ()))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inside(x) + self.around(x))

    class ChannelsFirst(nn.Module):  # type: ignore[name-defined]
        def forward(self, x: Any) -> Any:
            return x.permute(0, 3, 1, 2)

    blocks, inputs = [], 64
    for group, (width, number) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for index in range(number):
            stride = 2 if index == 0 and group > 0 else 1
            blocks.append(Block(inputs, width, stride, index == 0))
            inputs = 4 * width
    stem = [ChannelsFirst(), *normalized(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, NUM_CLASSES))


def _transformer(torch: Any, workload: str) -> Any:
    size = TRANSFORMERS[workload]
    settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = functools.partial(torch.nn.TransformerEncoderLayer, size.width, size.num_heads, 4 * size.width, **settings)
    return torch.nn.Sequential(*(block() for _ in range(size.num_blocks)))


if __name__ == "__main__":
    given, own_rank, hosts = received()
    serve(given, functools.partial(run_here, *start(given[0], own_rank, hosts)))
    os._exit(0)  # as benchmarks.worker: PyTorch sometimes aborts on its way out

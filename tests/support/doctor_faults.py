"""Faults of devices and workers in the doctor's processes: `TFPAR_TEST_FAULTS="KIND DEVICE, KIND RANK"`.

flip CPU:1       one bit of its products is flipped
flip_copy CPU:1  one bit of what is copied there is flipped
sleep CPU:1      its products take longer
hang CPU:1       its convolutions never end
crash CPU:1      its convolutions end the process
model CPU:1      the gradients of a model that it computes are wrong
version 1        the worker has another version of Keras
closed 1         its port is closed
clock 1          its clock is five seconds fast
blocked 1        it cannot connect to worker 2
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfpar.checks import processes, workers

VARIABLE = "TFPAR_TEST_FAULTS"
run_in_child = processes.run_in_child


def inject(monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    """Let all processes that the doctor starts have faults."""
    monkeypatch.setattr(processes, "run_in_child", run_with_faults)
    monkeypatch.setenv(VARIABLE, faults)


def run_with_faults(to_parent: Any, errors: str, task: processes.Task) -> None:
    result = processes._result

    def with_faults(task: processes.Task) -> Any:
        if task.num_cpus > 1:
            import tfpar

            tfpar.use_logical_cpus(task.num_cpus)
        for fault in os.environ[VARIABLE].split(", "):
            kind, where = fault.split()
            if where.isdigit():
                _of_worker(kind, int(where), task.arguments["job"])
            else:
                _of_device(kind, where)
        return result(task)

    processes._result = with_faults
    run_in_child(to_parent, errors, task)


def flipped(values: np.ndarray) -> np.ndarray:
    """Flip the lowest bit of one value."""
    bits = values.copy().view("uint32")
    bits.flat[7] ^= 1
    return bits.view("float32")


def _of_device(kind: str, faulty: str) -> None:
    import tensorflow as tf

    from tfpar.checks import device_tasks, model_tasks

    product, convolution, copied = device_tasks.product, device_tasks.convolution, device_tasks.copied
    seconds, step = device_tasks.product_seconds, model_tasks.one_step

    def flipping(device: str) -> tuple[np.ndarray, np.ndarray]:
        actual, expected = product(device)
        return (flipped(actual) if device == faulty else actual), expected

    def failing(device: str) -> tuple[np.ndarray, np.ndarray]:
        if device == faulty and kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while device == faulty:
            time.sleep(1)
        return convolution(device)

    def flipping_copy(values: tf.Tensor, source: str, target: str) -> Any:
        arrived = copied(values, source, target)
        return tf.constant(flipped(arrived.numpy())) if target == faulty else arrived

    def slow(device: str, total: Any) -> float:
        time_of_one = seconds(device, total)
        return 5 * time_of_one if device == faulty else time_of_one

    def wrong_step(model: Any, batch: Any, strategy: Any) -> Any:
        loss, gradients = step(model, batch, strategy)
        wrong = {path: tf.convert_to_tensor(gradient) * 1.01 for path, gradient in gradients.items()}
        return loss, wrong if strategy.device == faulty else gradients

    module, name, function = {
        "flip": (device_tasks, "product", flipping),
        "hang": (device_tasks, "convolution", failing),
        "crash": (device_tasks, "convolution", failing),
        "flip_copy": (device_tasks, "copied", flipping_copy),
        "sleep": (device_tasks, "product_seconds", slow),
        "model": (model_tasks, "one_step", wrong_step),
    }[kind]
    setattr(module, name, function)


def _of_worker(kind: str, faulty: int, job: Any) -> None:
    if job.rank != faulty:
        return
    facts: Any = workers.facts
    if kind == "closed":
        sys.exit(1)
    if kind == "version":
        workers.facts = lambda: {**facts(), "keras": "3.14.0"}
    if kind == "clock":
        fast: Any = SimpleNamespace(time=lambda: time.time() + 5.0, perf_counter=time.perf_counter)
        workers.time = fast
    if kind == "blocked":
        problem = {job.addresses[2]: "Connection timed out"}
        workers.reachability = SimpleNamespace(problems=lambda addresses, seconds: problem)  # type: ignore

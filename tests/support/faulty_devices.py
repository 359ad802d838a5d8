"""The program of the doctor's child processes, with a fault in a device or in a copy: `TFPAR_TEST_FAULT=KIND DEVICE`.

flip CPU:1       one bit of its products is flipped
flip_copy CPU:1  one bit of what is copied there is flipped
sleep CPU:1      its products take longer
hang CPU:1       its convolutions never end
crash CPU:1      its convolutions end the process
model CPU:1      the gradients of a model that it computes are wrong
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from tfpar.checks import child_program

VARIABLE = "TFPAR_TEST_FAULT"


def flipped(values: np.ndarray) -> np.ndarray:
    """Flip the lowest bit of one value."""
    bits = values.copy().view("uint32")
    bits.flat[7] ^= 1
    return bits.view("float32")


def install(kind: str, faulty: str) -> None:
    import tensorflow as tf

    from tfpar.checks import device_task, together_task

    product, convolution, copied = device_task.product, device_task.convolution, together_task.copied
    seconds = together_task.product_seconds

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
        begin = time.perf_counter()
        found = seconds(device, total)
        if device == faulty:
            time.sleep(4 * found)
        return time.perf_counter() - begin

    if kind == "model":
        from tfpar.checks import model_task

        step = model_task._step

        def wrong_step(model: Any, batch: Any, strategy: Any) -> Any:
            loss, gradients = step(model, batch, strategy)
            return loss, [*gradients[:-1], gradients[-1] * 1.01] if strategy.device == faulty else gradients

        model_task._step = wrong_step
    if kind == "flip":
        device_task.product = flipping
    if kind in ("hang", "crash"):
        device_task.convolution = failing
    if kind == "flip_copy":
        together_task.copied = flipping_copy
    if kind == "sleep":
        together_task.product_seconds = slow


if __name__ == "__main__":
    run = child_program._run

    def with_fault(given: dict[str, Any]) -> Any:
        import tfpar

        if given["num_cpus"] > 1:
            tfpar.use_logical_cpus(given["num_cpus"])
        install(*os.environ[VARIABLE].split())
        return run(given)

    child_program._run = with_fault
    child_program.main()

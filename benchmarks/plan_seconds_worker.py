"""One process of `benchmarks.plan_seconds`: the first step of a model on one device, and its plan."""

from __future__ import annotations

import os
import time

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tfpar


def run(model: str, batch: int) -> Output:
    """Return the seconds of the first step of a model, and of its plan.

    Args:
        model: The name of the model.
        batch: Examples of the global batch.
    """
    tfpar.use_logical_cpus(2, 1)
    return seconds_of(model, batch, ["CPU:0", "CPU:1"])


def seconds_of(model: str, batch: int, devices: list[str]) -> Output:
    """Return the seconds of the first step of a model on the first of some devices, and of its plan for all.

    Args:
        model: The name of the model.
        batch: Examples of the global batch.
        devices: The devices that are there.
    """
    from benchmarks.plan_models import BUILD_MODEL, dataset

    data = dataset(model, batch)
    began_seconds = time.perf_counter()
    trainer = tfpar.Trainer(BUILD_MODEL[model], tfpar.SingleDevice(devices[0]))
    trainer.fit(data, steps_per_epoch=1, verbose=0)
    first_step_seconds = time.perf_counter() - began_seconds
    began_seconds = time.perf_counter()
    plan = tfpar.plan(BUILD_MODEL[model], data, devices=devices)
    return {
        "planning_seconds": time.perf_counter() - began_seconds,
        "first_step_seconds": first_step_seconds,
        "measuring_seconds": plan.model.seconds,
        "spread": plan.model.spread,
    }


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker

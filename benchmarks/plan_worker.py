"""One process of `benchmarks.plan`: the planner's measurement, and the predicted and measured step of each layout."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import tfpar
from tfpar.planning.costs import MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import measure
from tfpar.planning.ranking import rank
from tfpar.planning.step_prediction import predict

_SECONDS, _REPEATS = 0.7, 3


def run(model: str, batch: int) -> Output:
    """Return the predicted and the measured step of each layout, and the regret of the planner's choice.

    Args:
        model: The name of the model.
        batch: Examples of the global batch.
    """
    from benchmarks.plan_models import BUILD_MODEL, dataset

    tfpar.use_logical_cpus(2, 1)
    data = dataset(model, batch)

    def make(strategy: tfpar.Strategy) -> tuple[tfpar.Trainer, tf.data.Dataset]:
        return tfpar.Trainer(BUILD_MODEL[model], strategy), data

    costs, machine = measure(make, ["CPU:0", "CPU:1"])
    layouts = [Layout(), *(Layout(2, shard=shard) for shard in (None, "optimizer", "weights")), Layout(num_shards=2)]
    layouts += [Layout(1, 2, number, "zero_bubble") for number in (2, 8)]
    layouts += [Layout(1, 2, number, recompute=recompute) for number in (2, 8) for recompute in (False, True)]
    return compared(costs, machine, layouts, make, data)


def compared(
    costs: ModelCosts,
    machine: MachineCosts,
    layouts: list[Layout],
    make: Callable[[tfpar.Strategy], tuple[tfpar.Trainer, tf.data.Dataset]],
    data: tf.data.Dataset,
) -> Output:
    """Predict and measure layouts."""
    steps = {str(layout): predict(layout, costs, machine) for layout in layouts}
    plan = rank(steps.values(), [], costs, machine)
    measured = {str(layout): _step_seconds(make(strategy_of(layout))[0], data) for layout in layouts}
    chosen = str((plan.take or plan.rows[0]).layout)
    output: dict[str, float | str] = {
        "regret": measured[chosen] / min(measured.values()),
        "chosen": chosen,
        "fastest": min(measured, key=measured.__getitem__),
        "planning_seconds": costs.seconds,
        "spread": costs.spread,
    }
    for name, step in steps.items():
        output |= {f"predicted {name}": step.seconds, f"measured {name}": measured[name]}
    return output


def _step_seconds(trainer: tfpar.Trainer, data: tf.data.Dataset) -> float:
    trainer.fit(data, steps_per_epoch=3, verbose=0)
    number = max(3, round(_SECONDS * _steps_per_second(trainer, data, 3)))
    return statistics.median(1 / _steps_per_second(trainer, data, number) for _ in range(_REPEATS))


def _steps_per_second(trainer: tfpar.Trainer, data: tf.data.Dataset, number: int) -> float:
    """Return the steps per second of a long call of `fit`, without the start of a short one."""
    seconds = []
    for steps in (1, 1 + number):
        began_seconds = time.perf_counter()
        trainer.fit(data, steps_per_epoch=steps, steps_per_call=steps, verbose=0)
        seconds.append(time.perf_counter() - began_seconds)
    return number / max(1e-9, seconds[1] - seconds[0])


def strategy_of(layout: Layout) -> tfpar.Strategy:
    """Return the strategy of a layout on the logical CPUs of this process.

    Args:
        layout: A layout of one host.
    """
    devices = [f"CPU:{number}" for number in range(layout.num_devices)]
    if layout.num_stages > 1:
        pipeline = tfpar.Pipeline(
            layout.num_stages,
            layout.num_microbatches,
            layout.schedule,
            devices=devices if layout.num_replicas == 1 else None,
            recompute=layout.recompute,
        )
        return pipeline if layout.num_replicas == 1 else tfpar.Hybrid(pipeline, layout.num_replicas, devices)
    if layout.num_shards > 1:
        return tfpar.TensorParallel(layout.num_shards, devices=devices)
    if layout.num_replicas > 1:
        return tfpar.Mirrored(devices, shard=layout.shard)
    return tfpar.SingleDevice(devices[0])


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker

"""One process of `benchmarks.plan`: the planner's measurement, and the predicted and measured step of each layout."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable

from benchmarks import process
from benchmarks.harness import Output

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import tfpar
from tfpar.planning.close_layouts import with_measured
from tfpar.planning.costs import MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.measurement import measure, measure_layout, strategy_of, with_split_factor
from tfpar.planning.planner import USUALLY_MEASURED
from tfpar.planning.ranking import best_of_each_grid, rank
from tfpar.planning.rows import PredictedStep
from tfpar.planning.step_prediction import predict

MakeTrainer = Callable[[tfpar.Strategy], tuple[tfpar.Trainer, tf.data.Dataset]]
_SECONDS, _REPEATS = 0.5, 3
_FEWEST_STEPS, _MOST_STEPS = 4, 512
_DEVICES = ["CPU:0", "CPU:1"]


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

    costs, machine = measure(make, _DEVICES)
    costs = with_split_factor(make, _DEVICES, costs)
    layouts = [Layout(), *(Layout(2, shard=shard) for shard in (None, "optimizer", "weights")), Layout(num_shards=2)]
    layouts += [Layout(1, 2, number, "zero_bubble") for number in (2, 8)]
    layouts += [Layout(1, 2, number, recompute=recompute) for number in (2, 8) for recompute in (False, True)]
    return compared(costs, machine, layouts, make, data, _DEVICES, drifts=True)


def compared(
    costs: ModelCosts,
    machine: MachineCosts,
    layouts: list[Layout],
    make: MakeTrainer,
    data: tf.data.Dataset,
    devices: list[str],
    drifts: bool = False,
) -> Output:
    """Predict and measure layouts.

    Args:
        costs: The measured costs of the model.
        machine: The costs of the devices.
        layouts: The layouts, each of one host.
        make: Returns a trainer under a strategy, and its data.
        data: Endless batches.
        devices: The devices that are there.
        drifts: Whether to measure the step of one device before and after that of each layout.

    Returns:
        The predicted and the measured step of each layout, that of one device around it, and the regret of the
        planner's choice.
    """
    steps = {str(layout): predict(layout, costs, machine) for layout in layouts}
    predicted_best = _chosen(list(steps.values()), costs, machine)

    def measured_step(step: PredictedStep) -> PredictedStep:
        seconds, spread = measure_layout(make, step.layout, devices)
        return dataclasses.replace(step, measured_seconds=seconds, spread=spread)

    rows, _ = with_measured(best_of_each_grid(steps.values(), machine), machine, measured_step, USUALLY_MEASURED)
    chosen = _chosen(rows, costs, machine)
    of_one = make(strategy_of(Layout(), devices))[0] if drifts else None
    measured, of_one_device = {}, {}
    for layout in layouts:
        seconds = [_step_seconds(one, data) for one in (of_one, make(strategy_of(layout, devices))[0], of_one) if one]
        measured[str(layout)] = seconds[len(seconds) // 2]
        of_one_device[str(layout)] = (seconds[0] + seconds[-1]) / 2
    shortest_seconds = min(measured.values())
    output: dict[str, float | str] = {
        "regret": measured[chosen] / shortest_seconds,
        "regret of prediction alone": measured[predicted_best] / shortest_seconds,
        "chosen": chosen,
        "chosen by prediction alone": predicted_best,
        "fastest": min(measured, key=measured.__getitem__),
        "planning_seconds": costs.seconds,
        "spread": costs.spread,
    }
    for name, step in steps.items():
        output |= {f"predicted {name}": step.seconds, f"measured {name}": measured[name]}
        if drifts:
            output[f"one device {name}"] = of_one_device[name]
    return output


def _chosen(steps: list[PredictedStep], costs: ModelCosts, machine: MachineCosts) -> str:
    plan = rank(steps, [], costs, machine)
    return str((plan.taken or plan.rows[0]).layout)


def _step_seconds(trainer: tfpar.Trainer, data: tf.data.Dataset) -> float:
    trainer.fit(data, steps_per_epoch=3, verbose=0)
    number = _FEWEST_STEPS
    while number < _MOST_STEPS and seconds_of_steps(trainer, data, number) < _SECONDS:
        number *= 2
    return statistics.median(seconds_of_steps(trainer, data, number) for _ in range(_REPEATS)) / number


def seconds_of_steps(trainer: tfpar.Trainer, data: tf.data.Dataset, number: int) -> float:
    """Return the seconds of some steps in a long call of `fit`, without the start of a short one.

    Args:
        trainer: A trainer that has trained already.
        data: Endless batches.
        number: Number of steps.
    """
    seconds = []
    for steps in (1, 1 + number):
        began_seconds = time.perf_counter()
        trainer.fit(data, steps_per_epoch=steps, steps_per_call=steps, verbose=0)
        seconds.append(time.perf_counter() - began_seconds)
    return seconds[1] - seconds[0]


if __name__ == "__main__":
    process.reply(run(**process.request()))
    os._exit(0)  # as benchmarks.worker

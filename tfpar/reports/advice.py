"""Advice on how to make a run faster, from its measured figures."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from tfpar import config
from tfpar.config import toml
from tfpar.messages.number_format import duration, three_digits
from tfpar.pipeline.schedule import make
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.timelines import PipelineRecord

LEAST_GAIN = 0.03  # smaller gains are within measurement noise
_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change that would make a run faster.

    Args:
        times: Speedup factor.
        what: The reason, with its figures, in sentences.
        settings: The settings to change, by key; may be empty.
        basis: The basis of the speedup: "measured", "measured, at most" or "simulated from measured times".
    """

    times: float
    what: str
    settings: Mapping[str, Any]
    basis: str

    @property
    def flags(self) -> str:
        """The flags of the train command that apply the change.

        Example:
            >>> Advice(1.2, "", {"data.cache": True}, "measured").flags
            '--set data.cache=true'
        """
        return " ".join(f"--set {shlex.quote(f'{key}={toml.show(value)}')}" for key, value in self.settings.items())

    @property
    def changes_weights(self) -> bool:
        """Whether the change may lead to other weights, so that it needs a new run directory."""
        return any(map(config.changes_weights, self.settings))


def advise(run: RecordedRun) -> list[Advice]:
    """Return the changes that would make a run at least three percent faster, the largest gain first."""
    changes = [*_data_advice(run), *_pipeline_advice(run), *_validation_advice(run)]
    return sorted((change for change in changes if change.times >= 1 + LEAST_GAIN), key=lambda change: -change.times)


def _data_advice(run: RecordedRun) -> Iterator[Advice]:
    share = run.figures.get("data_wait_share")
    if not is_number(share) or not 0 < share < 1:
        return
    what = f"A step waits {100 * share:.0f} % of its time for data."
    if run.settings.get("data.cache") is False:
        what += " A cache in memory removes at most all of it, from the second epoch on; the examples must fit."
        yield Advice(1 / (1 - share), what, {"data.cache": True}, "measured, at most")
    else:
        what += " No setting removes it: prepare the examples beforehand, or store them on a faster disk."
        yield Advice(1 / (1 - share), what, {}, "measured, at most")


def _pipeline_advice(run: RecordedRun) -> Iterator[Advice]:
    record = run.pipeline
    if record is None or record.durations is None:
        return
    try:
        now = simulate(record.schedule, record.durations).step_seconds
        steps = list(_more_microbatches(run, record, record.durations))
    except ValueError:  # a damaged record
        return
    for number, factor, seconds in steps:
        if now / seconds - 1 <= _simulation_error(record):
            continue  # the gain is within the error of the simulation
        what = (
            f"{100 * record.planned.bubble:.0f} % of the devices' time is bubble. With {number} micro-batches, each in "
            f"1/{factor} of the time of one now and with transfers as long, the simulated step is {duration(seconds)} "
            f"instead of {duration(now)}."
        )
        yield Advice(now / seconds, what, {"strategy.num_microbatches": number}, "simulated from measured times")


def _simulation_error(record: PipelineRecord) -> float:
    """Return the relative error of the simulated step, or 0 if no step was measured."""
    measured = record.measured
    if measured is None or measured.step_seconds <= 0:
        return 0.0
    return abs(record.planned.step_seconds / measured.step_seconds - 1)


def _more_microbatches(
    run: RecordedRun, record: PipelineRecord, durations: Durations
) -> Iterator[tuple[int, int, float]]:
    """Yield two and four times the number of micro-batches, the factor, and the simulated step in seconds.

    Transfers are assumed to take as long as now, as if latency dominated.
    """
    schedule, batch = record.schedule, run.settings.get("training.global_batch_size")
    replica = schedule.first_replica
    if schedule.name not in _SCHEDULES or not is_number(batch) or set(durations.microbatch_scale) - {1.0}:
        return
    for factor in (2, 4):
        number = factor * replica.num_microbatches
        if batch % (number * schedule.num_replicas):
            return
        other = make(schedule.name, replica.num_stages, number, replica.num_devices).replicated(schedule.num_replicas)
        yield number, factor, simulate(other, _divided(durations, factor)).step_seconds


def _divided(durations: Durations, factor: int) -> Durations:
    names = [f"{name}_seconds" for name in ("forward", "backward", "input_gradient", "weight_gradient")]
    values = {name: tuple(value / factor for value in getattr(durations, name)) for name in names}
    return dataclasses.replace(durations, microbatch_scale=(), **values)


def _validation_advice(run: RecordedRun) -> Iterator[Advice]:
    times = run.table("seconds")
    total, validation = times.get("fit"), times.get("validation")
    every, epochs = run.settings.get("training.validation_freq"), run.settings.get("training.epochs")
    if not (is_number(total) and is_number(validation) and is_number(every) and is_number(epochs)):
        return
    if epochs < 2 * every or not 0 < validation < total < float("inf"):
        return
    what = (
        f"Validation takes {three_digits(validation)} s of {three_digits(total)} s. Every {2 * every} epochs it takes "
        "half of that."
    )
    yield Advice(total / (total - validation / 2), what, {"training.validation_freq": 2 * every}, "measured")

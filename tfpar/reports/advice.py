"""What would make a run faster, in order of gain, from its measured and predicted figures alone. Pure Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpar import config
from tfpar.config import toml
from tfpar.messages.number_format import three_digits
from tfpar.pipeline.schedule import Schedule, make
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.planning.quantities import duration
from tfpar.reports.number_check import is_number
from tfpar.reports.recorded_run import RecordedRun
from tfpar.reports.timelines import PipelineRecord

LEAST_GAIN = 0.03  # of the time: less is within the noise of a measurement
MOST_ROWS = 5  # of one kind
_SHORT_CALL_SECONDS = 0.02
_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change that would make a run faster.

    Args:
        times: The speed after the change over the speed before; None where no figure says.
        what: The reason, with its figures, in a sentence.
        settings: The settings to change, by key.
        basis: Where the gain comes from: "measured", "simulated from measured times", "predicted", "not measured".
        another_run: Whether the change can train other weights, so that it needs another run directory.
    """

    times: float | None
    what: str
    settings: Mapping[str, Any]
    basis: str
    another_run: bool = False

    @property
    def line(self) -> str:
        """The flags of the train command that make the change; empty for a change of no setting.

        Example:
            >>> Advice(1.2, "", {"data.cache": True}, "measured").line
            '--set data.cache=true'
        """
        return " ".join(f"--set {_quoted(f'{key}={toml.show(value)}')}" for key, value in self.settings.items())


def _quoted(text: str) -> str:
    return f"'{text}'" if any(one in text for one in "\"' $[{") else text


def advise(run: RecordedRun) -> list[Advice]:
    """Return what would make a run faster, the largest gain first, those without a figure last.

    Args:
        run: A run.

    Returns:
        Changes that gain at least three percent, or whose gain is not known.
    """
    found = [*_of_data(run), *_of_pipeline(run), *_of_plan(run), *_of_calls(run), *_of_validation(run)]
    gainful = [one for one in found if one.times is None or one.times >= 1 + LEAST_GAIN]
    return sorted(gainful, key=lambda one: -(one.times or 0))


def _of(run: RecordedRun, times: float | None, what: str, basis: str, settings: Mapping[str, Any]) -> Advice:
    changed = {key: value for key, value in settings.items() if run.settings.get(key) != value}
    return Advice(times, what, changed, basis, any(map(config.changes_weights, changed)))


def _of_data(run: RecordedRun) -> Iterator[Advice]:
    share = run.figures.get("data_wait_share")
    if not is_number(share) or not 0 < share < 1:
        return
    what = f"A step waits {100 * share:.0f} % of its time for data."
    if run.settings.get("data.cache") is False:
        what += " A cache in memory removes at most all of it, from the second epoch on; the examples must fit."
        yield _of(run, 1 / (1 - share), what, "measured, at most", {"data.cache": True})
    else:
        what += " No setting removes it: prepare the examples beforehand, or store them on a faster disk."
        yield Advice(1 / (1 - share), what, {}, "measured, at most")


def _of_pipeline(run: RecordedRun) -> Iterator[Advice]:
    record = run.pipeline
    if record is None or record.durations is None:
        return
    schedule, durations = record.schedule, record.durations
    try:
        now = simulate(schedule, durations).step_seconds
        found = [*_other_schedules(schedule, durations), *_more_microbatches(run, schedule, durations)]
    except ValueError:  # a damaged record
        return
    for words, seconds, settings in found:
        if now / seconds - 1 <= _simulation_error(record):
            continue  # the simulation is wrong by more than it promises
        yield _of(
            run,
            now / seconds,
            f"{100 * record.planned.bubble:.0f} % of the devices' time is bubble. {words} the simulated step is "
            f"{duration(seconds)} instead of {duration(now)}.",
            "simulated from measured times",
            settings,
        )


def _simulation_error(record: PipelineRecord) -> float:
    """Return the relative error of the simulated step of the run's own schedule; 0 where it was not measured."""
    measured = record.measured
    if measured is None or measured.step_seconds <= 0:
        return 0.0
    return abs(record.planned.step_seconds / measured.step_seconds - 1)


def _other_schedules(schedule: Schedule, durations: Durations) -> Iterator[tuple[str, float, dict[str, Any]]]:
    one = schedule.of_one_replica
    if one.num_stages != one.num_devices:
        return
    for name in _SCHEDULES:
        has_times = durations.input_gradient_seconds if name == "zero_bubble" else durations.backward_seconds
        if name == schedule.name or not has_times:
            continue
        other = make(name, one.num_stages, one.num_microbatches).replicated(schedule.num_replicas)
        yield f"With schedule {name}", simulate(other, durations).step_seconds, {"strategy.schedule": name}


def _more_microbatches(
    run: RecordedRun, schedule: Schedule, durations: Durations
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield twice and four times as many micro-batches; their transfers may be latency alone, and take as long."""
    one, batch = schedule.of_one_replica, run.settings.get("training.global_batch_size")
    if schedule.name not in _SCHEDULES or not is_number(batch) or set(durations.microbatch_scale) - {1.0}:
        return
    for factor in (2, 4):
        number = factor * one.num_microbatches
        if batch % (number * schedule.num_replicas):
            return
        other = make(schedule.name, one.num_stages, number, one.num_devices).replicated(schedule.num_replicas)
        seconds = simulate(other, _divided(durations, factor)).step_seconds
        words = f"With {number} micro-batches, each in 1/{factor} of the time of one now and with transfers as long,"
        yield words, seconds, {"strategy.num_microbatches": number}


def _divided(durations: Durations, factor: int) -> Durations:
    of_microbatch = ("forward", "backward", "input_gradient", "weight_gradient")
    names = [f"{name}_seconds" for name in of_microbatch]
    return dataclasses.replace(
        durations,
        microbatch_scale=(),
        **{name: tuple(value / factor for value in getattr(durations, name)) for name in names},
    )


def _of_plan(run: RecordedRun) -> Iterator[Advice]:
    rows = [row for row in plan_rows(run) if is_number(row.get("step_seconds")) and row.get("fits") is not False]
    own = own_row(run, rows)
    now = run.step_seconds if own is None else known_seconds(own)
    if not now:
        return
    what = "measured" if own is None or is_number(own.get("measured_seconds")) else "predicted"
    faster = [row for row in rows if 0 < known_seconds(row) < now and _is_ranked_before(row, own)]
    better = sorted(faster, key=known_seconds)
    for row in better[:MOST_ROWS]:
        settings, seconds = row.get("settings"), known_seconds(row)
        kind = "measured" if is_number(row.get("measured_seconds")) else "predicted"
        if isinstance(settings, Mapping) and settings:
            yield _of(
                run,
                now / seconds,
                f"{row.get('layout')}: {kind} step {duration(seconds)}, against {duration(now)} {what} "
                "for the layout of this run.",
                kind,
                {f"strategy.{key}": value for key, value in settings.items()},
            )


def _is_ranked_before(row: Mapping[str, Any], own: Mapping[str, Any] | None) -> bool:
    """Return whether the plan ranks a row before that of the run: one without a rank may be no faster."""
    if "rank" not in row:
        return True
    rank, own_rank = row["rank"], None if own is None else own.get("rank")
    return is_number(rank) and (not is_number(own_rank) or rank < own_rank)


def known_seconds(row: Mapping[str, Any]) -> float:
    """Return the step of a layout: the planner's measurement, or else its prediction; 0 without one.

    Args:
        row: A row of a plan.

    Example:
        >>> known_seconds({"step_seconds": 0.5, "measured_seconds": None})
        0.5
    """
    measured, predicted = row.get("measured_seconds"), row.get("step_seconds")
    return measured if is_number(measured) else predicted if is_number(predicted) else 0.0


def plan_rows(run: RecordedRun) -> list[Mapping[str, Any]]:
    """Return the rows of a run's plan; empty without one.

    Args:
        run: A recorded run.
    """
    rows = run.plan.get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def own_row(run: RecordedRun, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of the plan that is this run's layout; None if none is.

    Args:
        run: A run.
        rows: The rows of its plan.
    """
    layout = run.prediction.get("layout")
    if named := next((row for row in rows if layout is not None and row.get("layout") == layout), None):
        return named
    for row in rows:
        settings = row.get("settings")
        if isinstance(settings, Mapping) and settings:
            own = {key: run.settings.get(f"strategy.{key}") for key in settings}
            if own == dict(settings):
                return row
    return None


def _of_calls(run: RecordedRun) -> Iterator[Advice]:
    steps, seconds = run.settings.get("training.steps_per_call"), run.step_seconds
    if is_number(steps) and seconds is not None and steps * seconds < _SHORT_CALL_SECONDS:
        what = (
            f"A call of the compiled function takes {duration(steps * seconds)} only ({steps} steps): the time between "
            "calls counts."
        )
        yield _of(run, None, what, "not measured", {"training.steps_per_call": "auto"})


def _of_validation(run: RecordedRun) -> Iterator[Advice]:
    times = run.table("seconds")
    total, validation = times.get("fit"), times.get("validation")
    every, epochs = run.settings.get("training.validation_freq"), run.settings.get("training.epochs")
    if not (is_number(total) and is_number(validation) and is_number(every) and is_number(epochs)):
        return
    if epochs < 2 * every or not 0 < validation < total < math.inf:
        return
    gain = validation / 2
    what = (
        f"Validation takes {three_digits(validation)} s of {three_digits(total)} s. Every {2 * every} epochs it takes "
        "half of that."
    )
    yield _of(run, total / (total - gain), what, "measured", {"training.validation_freq": 2 * every})

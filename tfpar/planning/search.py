"""Measure the most promising layouts within a time budget. Pure Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.layout import Layout
from tfpar.messages.number_format import memory, three_digits
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.planning.candidates import candidates, not_considered
from tfpar.planning.fitting import least_bytes
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Devices, Measured, NotMeasured, Plan, ranked

USUAL_BUDGET_SECONDS, MOST_BUDGET_SECONDS = 45.0, 86_400.0
OUT_OF_MEMORY = "ran out of memory"
_MEASURED_AGAIN = 2
CLOSE = 1.5  # families whose fastest layout is slower than this many times the fastest of all are skipped


def check_budget(name: str, seconds: float) -> None:
    """Refuse an invalid time budget.

    Args:
        name: The name of the argument or flag, for the message.
        seconds: The budget.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of range.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, received {seconds!r}. Write 60 for a minute.")
    if not 0 < seconds <= MOST_BUDGET_SECONDS:
        raise ValueError(f"{name} must be above 0 and at most {MOST_BUDGET_SECONDS:g} (a day), received {seconds}.")


class Failed(NamedTuple):
    """A layout that did not train.

    Args:
        reason: The reason, a sentence.
        is_refusal: Whether no layout of its family can train the model.
    """

    reason: str
    is_refusal: bool = False


Measure = Callable[[Layout], Measured | Failed]


class Search:
    """A search for the fastest layout.

    Args:
        measure: Trains a layout for some steps.
        budget_seconds: Seconds that the search may take.
        began_seconds: The reading of `clock` at the start.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self,
        measure: Measure,
        budget_seconds: float,
        began_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._measure, self._budget_seconds = measure, budget_seconds
        self._began_seconds, self._clock = began_seconds, clock
        self._measured: dict[Layout, Measured] = {}
        self._took_seconds: dict[Layout, float] = {}
        self._others: list[NotMeasured] = []

    def plan(
        self,
        facts: ModelFacts,
        devices: Devices,
        on_one_device: Measured | Failed,
        settings_of: Callable[[Layout], Mapping[str, Any]],
    ) -> Plan:
        """Measure layouts and return the plan.

        At least one layout of several devices is measured, whatever the budget; others only if they will probably end
        within it. If time remains, the two fastest are measured a second time.

        Args:
            facts: The model and its batch.
            devices: The available devices.
            on_one_device: The measured step on one device.
            settings_of: As for `ranked`.
        """
        self._add(Layout(), on_one_device, self._elapsed_seconds)
        peak_bytes = on_one_device.memory_bytes if isinstance(on_one_device, Measured) else None
        recompute = devices.memory_bytes is not None
        layouts = candidates(facts, devices.number, devices.num_workers, recompute=recompute)[1:]
        rest = self._fitting(layouts, facts, devices, peak_bytes)
        while (layout := next_layout(rest, self._step_seconds)) is not None and self._has_time():
            rest.remove(layout)
            if refusal := self._try(layout):
                self._others += [NotMeasured(other, refusal) for other in rest if other.family == layout.family]
                rest = [other for other in rest if other.family != layout.family]
        self._leave(rest, is_budget=layout is not None)
        self._measure_again()
        return ranked(
            self._measured,
            facts,
            devices,
            settings_of,
            self._others,
            seconds=self._elapsed_seconds,
            budget_seconds=self._budget_seconds,
            not_considered=tuple(not_considered(facts, devices.number, devices.num_workers)),
        )

    @property
    def _elapsed_seconds(self) -> float:
        return self._clock() - self._began_seconds

    @property
    def _step_seconds(self) -> dict[Layout, float]:
        return {layout: measured.step_seconds for layout, measured in self._measured.items()}

    def _fitting(
        self, layouts: Sequence[Layout], facts: ModelFacts, devices: Devices, peak_bytes: int | None
    ) -> list[Layout]:
        if devices.memory_bytes is None:
            return list(layouts)
        fitting: list[Layout] = []
        for layout in layouts:
            needed_bytes = least_bytes(layout, facts, peak_bytes)
            if needed_bytes <= devices.memory_bytes:
                fitting.append(layout)
            else:
                limit = memory(devices.memory_bytes)
                self._others.append(NotMeasured(layout, f"needs at least {memory(needed_bytes)}, a device has {limit}"))
        return fitting

    def _has_time(self) -> bool:
        """Return whether another layout and the second measurement of the fastest would probably end in time.

        The next layout is expected to take as long as the longest measurement of several devices so far.
        """
        others = [seconds for layout, seconds in self._took_seconds.items() if layout.num_devices > 1]
        again_seconds = sum(self._took_seconds[layout] for layout in self._fastest)
        return not others or self._elapsed_seconds + max(others) + again_seconds <= self._budget_seconds

    @property
    def _fastest(self) -> list[Layout]:
        return sorted(self._measured, key=self._step_seconds.__getitem__)[:_MEASURED_AGAIN]

    def _try(self, layout: Layout) -> str:
        """Measure a layout; return the reason if its family cannot train the model, else ""."""
        began_seconds = self._elapsed_seconds
        outcome = self._measure(layout)
        self._add(layout, outcome, self._elapsed_seconds - began_seconds)
        return outcome.reason if isinstance(outcome, Failed) and outcome.is_refusal else ""

    def _add(self, layout: Layout, outcome: Measured | Failed, took_seconds: float) -> None:
        self._took_seconds[layout] = took_seconds
        if isinstance(outcome, Failed):
            self._others.append(NotMeasured(layout, outcome.reason))
        else:
            self._measured[layout] = outcome

    def _leave(self, rest: Sequence[Layout], *, is_budget: bool) -> None:
        slow = f"others like it took more than {three_digits(CLOSE)} times the fastest"
        reason = f"the budget of {self._budget_seconds:g} s was spent" if is_budget else slow
        self._others += [NotMeasured(layout, reason) for layout in rest]

    def _measure_again(self) -> None:
        """Measure the two fastest again, so that a passing disturbance of the machine shows in their spread."""
        if len(self._measured) == 1:
            return
        for layout in self._fastest:
            if self._elapsed_seconds + self._took_seconds[layout] <= self._budget_seconds:
                again, first = self._measure(layout), self._measured[layout]
                if isinstance(again, Measured):
                    self._measured[layout] = first._replace(laps=(*first.laps, *again.laps))


def relative_step(layout: Layout) -> float:
    """Return the step time of a layout relative to one device, if only computation took time; for ordering alone.

    Example:
        >>> relative_step(Layout(4)), relative_step(Layout(num_stages=2, num_microbatches=4))
        (0.25, 0.625)
    """
    share = 1 / (layout.num_replicas * layout.num_shards)
    if layout.num_stages == 1:
        return share
    third = share / 3 / layout.num_stages / layout.num_microbatches
    each, recomputed = (third,) * layout.num_stages, third * layout.recompute
    durations = Durations(each, (2 * third + recomputed,) * layout.num_stages, each, each, (0.0,) * (len(each) - 1))
    schedule = schedules.make(layout.schedule, layout.num_stages, layout.num_microbatches)
    return round(simulate(schedule, durations).step_seconds, 9)


def next_layout(rest: Collection[Layout], step_seconds: Mapping[Layout, float]) -> Layout | None:
    """Return the layout to measure next; None if only slow families are left.

    The most promising layout of each family comes first, then the rest of families close to the fastest.

    Args:
        rest: The layouts that are not measured yet.
        step_seconds: The measured steps.

    Example:
        >>> next_layout([Layout(2, shard="optimizer"), Layout(2)], {Layout(): 1.0})
        Layout(num_replicas=2, ...)
        >>> next_layout([Layout(2, shard="optimizer")], {Layout(): 1.0, Layout(2): 1.6}) is None
        True
    """
    fastest: dict[tuple[str, bool, bool], float] = {}
    for layout, seconds in step_seconds.items():
        fastest[layout.family] = min(seconds, fastest.get(layout.family, seconds))
    least = min(fastest.values(), default=0.0)
    left = [layout for layout in rest if fastest.get(layout.family, 0.0) <= CLOSE * least]
    return min(
        left,
        key=lambda layout: (fastest.get(layout.family, 0.0), relative_step(layout), layout.simplicity),
        default=None,
    )

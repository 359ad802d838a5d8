"""A turn: settings that one process measures one after the other, so that TensorFlow starts on the GPU once.

The process writes the figures of each setting as soon as it has them. A setting that takes longer than its limit ends
the process; the settings after it get another one.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks import process
from benchmarks.gpus.setting import GpuSetting, from_json
from benchmarks.harness import Output
from tfpar.launcher.reserved_ports import ReservedPorts

FAILED = "failed"  # the figure of a setting that has no others: the reason
_STANDARD_ERROR = os.dup(2)  # tfpar holds back what is written there while TensorFlow starts


def measure(settings: Sequence[GpuSetting], budget_seconds: float) -> Iterator[tuple[GpuSetting, Output]]:
    """Measure settings in one process, or in one for each device, and yield their figures as they come.

    After a failure the settings that follow are not measured, and after the budget neither is the one that it cut off.

    Args:
        settings: Of the same trainer on the same devices.
        budget_seconds: When to end.
    """
    deadline = time.monotonic() + budget_seconds
    first, waiting = settings[0], iter(settings)
    with ReservedPorts(first.num_processes if first.num_processes > 1 else 0) as ports:
        requests = [
            {"settings": [dataclasses.asdict(one) for one in settings], "rank": rank, "addresses": ports.addresses}
            for rank in range(first.num_processes)
        ]
        try:
            for output in process.stream(first.module, requests, budget_seconds):
                yield next(waiting), output
        except process.WorkerError as error:
            if time.monotonic() < deadline:
                yield next(waiting), {FAILED: _reason(str(error), first.limit_seconds)}


def _reason(error: str, limit_seconds: float) -> str:
    return f"more than {limit_seconds:g} s" if "Timeout (" in error else " ".join(error.split())[-200:]


def received() -> tuple[list[GpuSetting], int, list[str]]:
    """Return the settings of this process, its rank, and the addresses of all; its first limit begins."""
    request = process.request()
    settings = [from_json(held) for held in request["settings"]]
    _limit(settings[0])
    return settings, request["rank"], request["addresses"]


def serve(settings: Sequence[GpuSetting], run: Callable[[GpuSetting], Output]) -> None:
    """Write the figures of each setting, or why there are none.

    Args:
        settings: From `received`.
        run: Measures one.
    """
    for setting in settings:
        _limit(setting)
        try:
            output = run(setting)
        except Exception as error:  # that of a trainer, which is a result
            output = {FAILED: f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        process.reply(output)


def _limit(setting: GpuSetting) -> None:
    """End this process after the limit of a setting, also inside of a compilation."""
    faulthandler.dump_traceback_later(setting.limit_seconds, exit=True, file=_STANDARD_ERROR)


def figures(setting: GpuSetting, first_step_seconds: float, moments: Sequence[float]) -> dict[str, float]:
    """Return the figures of a setting.

    Args:
        setting: What was measured.
        first_step_seconds: From the building of the model to the end of its first step.
        moments: The begin and the end of each group of steps; the first group is left out.

    Example:
        >>> figures(GpuSetting("", "tiny", "keras", 8, ("CPU:0",), steps_per_lap=2), 9.0, [0, 5, 5, 7, 7, 9])
        {'examples_per_second': 8.0, 'step_seconds': 1.0, 'first_step_seconds': 9.0}
    """
    laps = [end - begin for begin, end in zip(moments[2::2], moments[3::2], strict=True)]
    step_seconds = statistics.median(laps) / setting.steps_per_lap
    return {
        "examples_per_second": setting.batch_size / step_seconds,
        "step_seconds": step_seconds,
        "first_step_seconds": first_step_seconds,
    }

"""Pipeline schedules: the order of forward and backward passes on each device. Pure Python."""

from tfpar.pipeline.schedule.actions import Action, Kind, Schedule, parse
from tfpar.pipeline.schedule.factory import NAMES, limit_stages, make, on_one_device
from tfpar.pipeline.schedule.validator import check, peak_activations

__all__ = [
    "NAMES",
    "Action",
    "Kind",
    "Schedule",
    "check",
    "limit_stages",
    "make",
    "on_one_device",
    "parse",
    "peak_activations",
]

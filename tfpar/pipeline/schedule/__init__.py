"""The schedules of a pipeline: the order in which devices run forward and backward passes; pure Python."""

from tfpar.pipeline.schedule.actions import Action, Kind, Schedule, parse
from tfpar.pipeline.schedule.factory import NAMES, make, of_fewer_stages
from tfpar.pipeline.schedule.validator import check, peak_activations

__all__ = ["NAMES", "Action", "Kind", "Schedule", "check", "make", "of_fewer_stages", "parse", "peak_activations"]

"""Strategies: constructors that turn their arguments into a layout, a job and an engine."""

from tfpar.engines.distributed import Distributed
from tfpar.strategies.base import Strategy
from tfpar.strategies.factory import from_settings, of_layout
from tfpar.strategies.hybrid import Hybrid
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker import MultiWorker
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.resolve import resolve, strategy_of
from tfpar.strategies.single_device import SingleDevice
from tfpar.strategies.tensor_parallel import TensorParallel
from tfpar.workers.lost_workers import WorkerLostError, lost_worker

__all__ = [
    "Distributed",
    "Hybrid",
    "Mirrored",
    "MultiWorker",
    "Pipeline",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "WorkerLostError",
    "from_settings",
    "lost_worker",
    "of_layout",
    "resolve",
    "strategy_of",
]

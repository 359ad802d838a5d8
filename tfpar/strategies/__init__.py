"""One file a strategy; each supplies only how a step runs."""

from tfpar.strategies.base import Strategy
from tfpar.strategies.distributed import Distributed
from tfpar.strategies.factory import from_settings, of_layout
from tfpar.strategies.lost_workers import WorkerLostError, lost_worker
from tfpar.strategies.mirrored import Mirrored
from tfpar.strategies.multi_worker import MultiWorker
from tfpar.strategies.multi_worker.hybrid import Hybrid
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.resolve import resolve, strategy_of
from tfpar.strategies.single_device import SingleDevice
from tfpar.strategies.tensor_parallel import TensorParallel

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

"""Data parallelism over several processes, on one machine or on many."""

from tfpar.strategies.multi_worker.strategy import MultiWorker

__all__ = ["MultiWorker"]

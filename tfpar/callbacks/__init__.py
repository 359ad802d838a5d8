"""Keras callbacks of tfpar."""

from tfpar.callbacks.learning_rate_warmup import LearningRateWarmup
from tfpar.callbacks.metrics_file import MetricsFile, read_metrics
from tfpar.callbacks.replica_check import ReplicaCheck
from tfpar.callbacks.throughput import FIGURES, Throughput

__all__ = ["FIGURES", "LearningRateWarmup", "MetricsFile", "ReplicaCheck", "Throughput", "read_metrics"]

"""Tensor parallelism: the layers of a model divided over the devices of this machine."""

from tfpar.strategies.tensor_parallel.strategy import TensorParallel

__all__ = ["TensorParallel"]

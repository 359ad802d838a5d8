"""Replace Keras 3's chains of operations by TensorFlow's fused kernels while a step is traced."""

from tfpar.kernels.replacement import fused

__all__ = ["fused"]

"""TensorFlow's fused kernels in place of Keras 3's chains of operations, while a step is traced."""

from tfpar.kernels.replacement import fused

__all__ = ["fused"]

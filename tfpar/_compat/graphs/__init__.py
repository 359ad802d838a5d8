"""TensorFlow graphs, functions, gradients and kernels."""

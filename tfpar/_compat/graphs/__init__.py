"""Graphs, functions, gradients and kernels of TensorFlow."""

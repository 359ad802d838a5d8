"""Keras models, layers, losses and metrics."""

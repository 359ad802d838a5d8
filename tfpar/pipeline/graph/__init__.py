"""Keras models as graphs of layer calls."""

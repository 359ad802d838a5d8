"""Keras optimizers: their updates and their slots."""

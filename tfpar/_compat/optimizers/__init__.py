"""Optimizers of Keras: their updates, and their slots."""

"""Losses, metrics and gradients of parts of a batch, reduced to those of the whole batch."""

"""Gradients of parts of a batch: their sums, their order, and sparse gradient rows."""

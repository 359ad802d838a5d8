"""Gradients of parts of a batch: their order, their sums, and the rows of sparse ones."""

"""Recomputation: activations that the backward pass computes again instead of reading them from memory."""

"""Tensor parallelism: which layers are sharded over devices, how they are computed, and where their weights are."""

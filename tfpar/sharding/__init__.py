"""Sharding rules: which layers of a model are divided over devices, how each is computed, where its weights are."""

"""Sharding: the assignment of examples to workers."""

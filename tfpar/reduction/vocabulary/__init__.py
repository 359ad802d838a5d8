"""Losses and metrics of scores in shards along the classes."""

"""Losses and metrics of class scores that are sharded over devices."""

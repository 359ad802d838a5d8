"""Predicted and measured times and memory of a pipeline, as data, tables and pictures."""

"""Predicted and measured times and memory of a pipeline, as tables and pictures."""

"""Execution of a schedule: the steps of a pipeline as TensorFlow graphs."""

"""Keras' own tests with tfpar in place of `fit`, `evaluate` and `predict`: `python -m tests.keras_suite`."""

"""Benchmarks: one harness, named experiments, Keras' own `fit` beside tfpar in the same run."""

"""Benchmarks: one harness, named experiments, Keras' own `fit` and tfpar in the same run."""

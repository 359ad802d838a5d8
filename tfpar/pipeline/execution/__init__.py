"""A step of a pipeline as one TensorFlow graph."""

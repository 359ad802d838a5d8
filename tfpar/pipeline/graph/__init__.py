"""A Keras model as a graph of operations."""

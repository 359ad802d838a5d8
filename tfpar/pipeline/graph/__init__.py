"""A Keras model as a graph of layer calls."""

"""Models, layers, losses and metrics of Keras."""

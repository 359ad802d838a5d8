"""All uses of private Keras and TensorFlow APIs, by upstream module."""

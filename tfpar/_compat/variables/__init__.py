"""Variables of Keras and TensorFlow: memory, names, keys and devices."""

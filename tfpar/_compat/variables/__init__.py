"""Variables of Keras and TensorFlow: their memory, names, keys and devices."""

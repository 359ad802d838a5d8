"""Everything private of Keras and TensorFlow that tfpar touches, by upstream surface."""

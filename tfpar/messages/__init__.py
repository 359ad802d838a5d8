"""Building blocks of messages: received values, numbers, suggestions. Imports no TensorFlow."""

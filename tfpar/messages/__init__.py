"""What messages are made of: received values, numbers, suggestions; no TensorFlow."""

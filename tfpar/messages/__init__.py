"""Parts of messages: received values, numbers, suggestions; imports no TensorFlow."""

"""Where TensorFlow would run the operations of a step if its devices were GPUs; the sizes that the host computes."""

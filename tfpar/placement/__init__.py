"""Where TensorFlow would run the operations of a step if its devices were GPUs, read without one."""

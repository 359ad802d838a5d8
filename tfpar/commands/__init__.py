"""The parts that all commands of tfpar share; no TensorFlow."""

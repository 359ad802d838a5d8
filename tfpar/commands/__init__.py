"""What the commands of tfpar share; no TensorFlow."""

"""What all commands of tfpar share. It does not import TensorFlow."""

"""The owner of each weight, and the devices of its memory and of the operations on it."""

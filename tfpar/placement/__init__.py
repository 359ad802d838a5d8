"""The owner of each weight, and the device of its memory and of the operations on it."""

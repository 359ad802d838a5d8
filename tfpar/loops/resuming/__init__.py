"""The start of training: equal weights on all workers, and the position in the data."""

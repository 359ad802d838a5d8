"""Where training starts: the weights and counters of all workers, and the position in the data."""

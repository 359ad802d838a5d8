"""The study: before the first step, probe whether the parts of a batch give the results of the whole batch."""

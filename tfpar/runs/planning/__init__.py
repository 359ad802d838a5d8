"""The plan of a run: its job, the layouts that a process measures, and the files that keep them."""

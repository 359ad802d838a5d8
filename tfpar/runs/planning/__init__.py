"""The plan of a run: measurement of layouts in subprocesses, and stored plans."""

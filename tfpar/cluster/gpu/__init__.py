"""The GPUs of a host: which are visible, their free memory, and how Slurm tasks share them."""

"""What `python -m benchmarks gpu` measures: trainers on GPUs, within a budget of seconds."""

"""Pipelines next to PyTorch's and one core: step times, memory, predictions and the first step."""

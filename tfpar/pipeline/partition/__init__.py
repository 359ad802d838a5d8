"""The partition of a model's layer calls into stages."""

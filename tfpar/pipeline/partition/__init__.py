"""The assignment of a model's layer calls to stages."""

"""The assignment of a model's layer calls to stages, and of its weights to devices."""

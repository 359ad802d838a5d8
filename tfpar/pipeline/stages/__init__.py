"""The stages of a model as compiled functions."""

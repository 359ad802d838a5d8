"""The stages of a model, from layer calls to compiled passes."""

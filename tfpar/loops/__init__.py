"""The loops of `fit`, `evaluate` and `predict`, and the preparation of their first step."""

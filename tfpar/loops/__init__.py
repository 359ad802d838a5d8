"""The loops of `fit`, `evaluate` and `predict`, and what comes before their first step."""

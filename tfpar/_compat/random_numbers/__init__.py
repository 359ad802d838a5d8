"""Random ops of models: their state, and deterministic replacements."""

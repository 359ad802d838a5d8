"""Random numbers that a model draws: their state, and draws that repeat."""

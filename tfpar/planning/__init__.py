"""The choice of a layout before training: candidates, those that can fit, their order, and their measured steps."""

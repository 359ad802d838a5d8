"""Scaling on paper: a table for up to 1,024 devices, computed from measured parts."""

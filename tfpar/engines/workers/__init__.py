"""Engines in several processes, and the collectives between their workers."""

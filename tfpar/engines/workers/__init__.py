"""The engines in several processes: collectives between workers, and what they sum."""

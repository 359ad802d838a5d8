"""The engines of stages and shards, whose steps follow a schedule on a grid of devices."""

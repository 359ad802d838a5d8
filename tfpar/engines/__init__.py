"""Engines: how a step runs, on one device, on replicas, or in stages and shards."""

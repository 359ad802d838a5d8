"""Engines, which run the steps: on one device, on replicas, or in stages and shards."""

"""Experiments on GPUs: one device, scaling, pipelines."""

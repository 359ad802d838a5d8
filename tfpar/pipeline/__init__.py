"""Pipeline parallelism: a model cut into stages, micro-batches that pass through them in the order of a schedule.

The modules `schedule`, `simulate` and `balance` are pure Python: planning a pipeline needs no TensorFlow.
"""

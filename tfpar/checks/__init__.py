"""The checks of `python -m tfpar.doctor`: the machine, each device, all devices together, a model, the network.

report         the result of a check; results as text and JSON
machine        versions, driver and memory, without TensorFlow
processes      tasks in subprocesses with time limits
..._tasks      the code that runs in those subprocesses
devices        each device alone, and all together
models         a user's model on each device
workers        the network between workers
doctor         all checks, in order
"""

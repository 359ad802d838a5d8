"""The checks of `python -m tfpar.doctor`: this machine, each device by itself, devices together, a model, workers.

report         the result of a check, and results as text and JSON
machine        versions, driver, memory, without TensorFlow
processes      tasks in processes of their own, with time limits
..._tasks      what they compute there
devices        each device by itself, and several together
models         a user's model on each device and under its strategy
workers        the network between workers
doctor         all checks in their order
"""

"""The checks of `python -m tfpar.doctor`: this machine, each device by itself, devices together, a model, workers.

check              the result of one check
report             results as text, as JSON, and as a block for an issue
machine            versions, driver, memory, without TensorFlow
child_processes    tasks in processes of their own, with time limits
child_program      the program of such a process
..._task           what it computes there: on one device, on several, with a model
devices, together  the results of these tasks as checks
examination        all checks in their order
"""

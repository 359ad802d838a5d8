"""Pipeline parallelism: the stages of a model train on different micro-batches at the same time.

schedule    the order of forward and backward passes on each device, and its simulation; pure Python
graph       the model as a graph of layer calls
partition   the partition of layer calls into stages
stages      the stages as compiled functions
loss        the loss and the update of metrics as compiled functions
execution   a schedule as one TensorFlow graph: the steps of a model
analysis    predicted and measured times and memory
"""

from tfpar.pipeline import schedule

__all__ = ["schedule"]

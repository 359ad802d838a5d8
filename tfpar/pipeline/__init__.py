"""Pipeline parallelism: a model in stages on several devices, which train on micro-batches at the same time.

schedule    the order of the forward and backward passes on each device, and its simulation; pure Python
graph       the model as a graph of layer calls
partition   the assignment of layer calls to stages
stages      the stages as compiled functions
loss        the loss and the updates of metrics as compiled functions
execution   a schedule as one TensorFlow graph: the steps of a model
analysis    predicted and measured times and memory, as a table and a picture
"""

from tfpar.pipeline import schedule

__all__ = ["schedule"]

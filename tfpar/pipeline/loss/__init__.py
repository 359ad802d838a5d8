"""The loss of a micro-batch and the updates of metrics after the last stage, as compiled functions."""

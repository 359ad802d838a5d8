"""The loss of a micro-batch and the update of metrics, as compiled functions."""

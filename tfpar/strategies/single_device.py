"""Training on one device."""

from __future__ import annotations

from tfpar import cluster
from tfpar.engines.one_device import OneDevice
from tfpar.layout import Layout
from tfpar.messages import keyword_arguments
from tfpar.strategies.base import Strategy


class SingleDevice(Strategy):
    """Training on one device, without a `tf.distribute` strategy.

    The steps are those of Keras' own `fit` and give the same weights, with less time between steps.

    Args:
        device: Device name such as `"GPU:1"`; None leaves the placement to TensorFlow.

    Example:
        >>> strategy = SingleDevice("CPU:0")
        >>> strategy.num_replicas
        1
    """

    @keyword_arguments.named
    def __init__(self, device: str | None = None) -> None:
        if device is not None and not isinstance(device, str):
            raise TypeError(f'device must be one name such as "CPU:0" or "GPU:0", received {device!r}.')
        self.device = None if device is None else cluster.resolve_devices([device])[0]
        super().__init__(Layout(), OneDevice(self.device))

    def describe(self) -> str:
        """Return a one-line description of the device."""
        return f"SingleDevice on {self.device_names[0]}"

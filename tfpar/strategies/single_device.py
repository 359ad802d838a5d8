"""Training on one device."""

from __future__ import annotations

from tfpar import cluster
from tfpar.engines.one_device import OneDevice
from tfpar.layout import Layout
from tfpar.messages import keyword_arguments
from tfpar.recomputation.choice import Recompute, check
from tfpar.strategies.base import Strategy


class SingleDevice(Strategy):
    """Training on one device, without a `tf.distribute` strategy.

    The steps are those of Keras' own `fit` and give the same weights, with less time between steps.

    Args:
        device: Device name such as `"GPU:1"`; None leaves the placement to TensorFlow.
        recompute: True: keep only the inputs of layers for the backward pass, which computes them again: less memory
            for more time, with the same results. A list: only of the layers with these names, patterns or classes,
            such as `["block_*", keras.layers.MultiHeadAttention]`.

    Raises:
        TypeError: If an argument has the wrong type.

    Example:
        >>> strategy = SingleDevice("CPU:0")
        >>> strategy.num_replicas
        1
    """

    @keyword_arguments.named
    def __init__(self, device: str | None = None, recompute: Recompute = False) -> None:
        if device is not None and not isinstance(device, str):
            raise TypeError(f'device must be one name such as "CPU:0" or "GPU:0", received {device!r}.')
        self.device = None if device is None else cluster.resolve_devices([device])[0]
        super().__init__(Layout(recompute=bool(recompute)), OneDevice(self.device, check(recompute)))

    def describe(self) -> str:
        """Return a one-line description of the device."""
        return f"SingleDevice on {self.device_names[0]}{', recomputing' * self.layout.recompute}"

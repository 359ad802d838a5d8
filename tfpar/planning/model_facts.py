"""What a plan knows of a model before it measures layouts. Pure Python, no TensorFlow."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model and its batch.

    Args:
        name: The name of the model.
        num_parameters: The number of its parameters.
        batch: Examples in the global batch.
        weight_bytes: Bytes of all weights.
        variable_bytes: Bytes of each trainable weight.
        slot_bytes: Bytes of the optimizer's state.
        num_blocks: Number of layer calls between which the model can be cut; 0 if it cannot be cut.
        uncut: Why the model cannot be cut, a sentence; "" if it can.
        divides_layers: Whether tensor parallelism can shard some of its layers.
        normalizing: Names of layers that normalize each micro-batch or per-replica batch by itself.
        wait_seconds: Median seconds to read a batch.

    Example:
        >>> ModelFacts("mlp", 100, 32, 400, (300, 100), 800).trainable_bytes
        400
    """

    name: str
    num_parameters: int
    batch: int
    weight_bytes: int
    variable_bytes: tuple[int, ...]
    slot_bytes: int
    num_blocks: int = 0
    uncut: str = ""
    divides_layers: bool = False
    normalizing: tuple[str, ...] = ()
    wait_seconds: float = 0.0

    @property
    def trainable_bytes(self) -> int:
        """The bytes of all trainable weights, and of their gradients."""
        return sum(self.variable_bytes)

"""The measured costs of a model and of a machine, from which steps and memory are predicted. Pure Python."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tfpar.pipeline.schedule.links import Link


class Line(NamedTuple):
    """Seconds that grow with the examples: a start, and a slope.

    Args:
        start_seconds: Seconds without examples.
        seconds_per_example: Seconds of each example.

    Example:
        >>> Line(0.5, 0.25).seconds(2)
        1.0
    """

    start_seconds: float = 0.0
    seconds_per_example: float = 0.0

    def seconds(self, num_examples: float) -> float:
        """Return the seconds of some examples."""
        return self.start_seconds + self.seconds_per_example * num_examples


class Bytes(NamedTuple):
    """Bytes that grow with the examples.

    Args:
        start_bytes: Bytes without examples.
        bytes_per_example: Bytes of each example.

    Example:
        >>> Bytes(100, 8).of(4)
        132
    """

    start_bytes: float = 0.0
    bytes_per_example: float = 0.0

    def of(self, num_examples: float) -> int:
        """Return the bytes of some examples."""
        return round(self.start_bytes + self.bytes_per_example * num_examples)


class Factored(NamedTuple):
    """The gradients of a block of which replicas on several hosts send rows: of factors, or of embeddings.

    Args:
        gradient_bytes: Bytes of these gradients.
        row_bytes: Bytes of the rows of the global batch.
        product_seconds: Seconds of the products of factors of all rows.

    Example:
        >>> Factored(gradient_bytes=4096, row_bytes=512, product_seconds=1e-4).row_bytes
        512
    """

    gradient_bytes: int = 0
    row_bytes: int = 0
    product_seconds: float = 0.0


Entry = TypeVar("Entry")

NO_BYTES = Bytes()
NOT_FACTORED = Factored()
_UNMEASURED = Link(latency_seconds=0.0, bytes_per_second=1e9)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured seconds at some numbers of examples: linear in between, and beyond the two ends.

    Args:
        sizes: Numbers of examples, ascending, at least one.
        seconds: The seconds at each.

    Example:
        >>> Curve((2, 4), (1.0, 1.5)).at(3), Curve((2, 4), (1.0, 1.5)).at(8)
        (1.25, 2.5)
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, num_examples: float) -> float:
        """Return the seconds of some examples, at least 0."""
        if len(self.sizes) == 1:
            return self.seconds[0] * num_examples / self.sizes[0]
        pairs = list(zip(itertools.pairwise(self.sizes), itertools.pairwise(self.seconds), strict=True))
        (low, high), (of_low, of_high) = next((pair for pair in pairs if num_examples <= pair[0][1]), pairs[-1])
        return max(0.0, of_low + (of_high - of_low) * (num_examples - low) / (high - low))


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The costs of one layer call on one device.

    Args:
        name: The name of the layer.
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass.
        weight_bytes: Bytes of its weights; of shared weights, only at the first call.
        trainable_bytes: Bytes of its trainable weights.
        output: Bytes of its outputs.
        cut: Bytes that cross a cut after it.
        saved: Bytes that its backward pass needs, from the forward pass on, and that no earlier block saves.
        temporary: Bytes of its largest temporary in the backward pass.
        divided_bytes: Bytes of its weights that tensor parallelism divides.
        summed: Bytes that tensor parallelism sums over the shards, in both passes together.
        is_divided: Whether tensor parallelism computes a part of it on each shard.
        shared: Bytes of its inputs that its backward pass needs, and that an earlier block saves.
        factored: Its gradients of which several hosts send rows, and not the sums.
        variable_bytes: Bytes of each of its trainable weights; of shared weights, only at the first call.
    """

    name: str
    forward: Line
    backward: Line
    weight_bytes: int
    trainable_bytes: int
    output: Bytes = NO_BYTES
    cut: Bytes = NO_BYTES
    saved: Bytes = NO_BYTES
    temporary: Bytes = NO_BYTES
    divided_bytes: int = 0
    summed: Bytes = NO_BYTES
    is_divided: bool = False
    shared: Bytes = NO_BYTES
    factored: Factored = NOT_FACTORED
    variable_bytes: tuple[int, ...] = ()

    def seconds(self, num_examples: float) -> float:
        """Return the seconds of both passes of some examples."""
        return self.forward.seconds(num_examples) + self.backward.seconds(num_examples)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """The measured costs of a model, its optimizer and its data, on one device.

    Args:
        name: The name of the model.
        num_parameters: Parameters, untrained ones included.
        weight_bytes: Bytes of all weights.
        trainable_bytes: Bytes of the trainable weights, which are those of the gradients.
        slot_bytes: Bytes of the optimizer's state.
        variable_bytes: Bytes of each trainable weight.
        batch: Examples of the global batch.
        compute: Seconds of forward pass, loss, metrics and backward pass on one device, by the number of examples.
        update_seconds: Seconds of the optimizer's update on one device.
        replica_seconds: Seconds of a step on one device of `tf.distribute` beyond those without it.
        staged: Seconds of forward and backward pass of a micro-batch in a pipeline of one stage, with the sum of the
            gradients; None where the model cannot be cut.
        split_factor: Seconds of a micro-batch on a stage with a split backward pass, relative to a whole one; None
            where it is not measured, so that no layout with such a pass is considered.
        loss_seconds: Seconds of the loss of an example and of its gradient.
        loss_of_pieces_seconds: The same for outputs in pieces, as tensor parallelism leaves them, on one device; None
            where it gathers them.
        data_seconds: Seconds until the next batch of the dataset is there.
        data_core_seconds: Seconds of processor time that reading a batch takes, on all cores together.
        input_bytes: Bytes of the inputs and targets of an example.
        target_bytes: Of these, the bytes of its targets and its weight, which a pipeline's last stage gets.
        working: Bytes of a training step on one device beyond weights, slots and runtime: saved tensors, gradients and
            temporaries at the peak.
        scratch: Of these, the bytes of each example beyond the results of operations in one order.
        blocks: The layer calls in the order of the graph; empty where the model cannot be cut.
        uncut: Why the model cannot be cut, a sentence; "" where it can.
        mixing: Layers that mix the examples of a batch, which replicas refuse.
        normalizing: Layers that normalize the examples of each replica, or micro-batch, by themselves.
        spread: Relative spread of the measurements, the largest of those that change a step: 0.02 for 2 %.
        seconds: Duration of the measurement.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    trainable_bytes: int
    slot_bytes: int
    variable_bytes: tuple[int, ...]
    batch: int
    compute: Curve
    update_seconds: float
    replica_seconds: float = 0.0
    staged: Curve | None = None
    split_factor: float | None = 1.0
    loss_seconds: float = 0.0
    loss_of_pieces_seconds: float | None = None
    data_seconds: float = 0.0
    data_core_seconds: float = 0.0
    input_bytes: int = 0
    target_bytes: int = 0
    working: Bytes = NO_BYTES
    scratch: Bytes = NO_BYTES
    blocks: tuple[BlockCost, ...] = ()
    uncut: str = ""
    mixing: tuple[str, ...] = ()
    normalizing: tuple[str, ...] = ()
    spread: float = 0.0
    seconds: float = 0.0

    def staged_seconds(self, num_examples: float) -> float:
        """Return the seconds of a micro-batch in a pipeline of one stage.

        Beyond the largest measured one they grow as those of `compute`, which is measured up to the global batch.

        Args:
            num_examples: Examples of the micro-batch.

        Example:
            >>> costs = ModelCosts("mlp", 8, 32, 32, 0, (8,) * 4, 8, Curve((2, 8), (2.0, 5.0)), 0.0)
            >>> dataclasses.replace(costs, staged=Curve((1, 2), (2.0, 4.0))).staged_seconds(4)
            5.0
        """
        if self.staged is None:
            return self.compute.at(num_examples)
        largest = min(num_examples, self.staged.sizes[-1])
        beyond_seconds = self.compute.at(num_examples) - self.compute.at(largest)
        return self.staged.at(largest) + max(0.0, beyond_seconds)


@dataclasses.dataclass(frozen=True)
class MachineCosts:
    """The measured or stated costs of devices and links.

    Args:
        device: The kind of the devices that were measured: "CPU", or the name of a GPU.
        num_devices: Devices of each host, those planned for.
        num_measured: Devices that are there.
        num_hosts: Number of hosts.
        slowdown: Seconds of the model's training step with n devices at once, relative to one device, by n; a larger
            number takes the largest measured.
        slowdown_of_stages: The same of micro-batches of pipelines, measured with two devices; empty where no pipeline
            was measured.
        copy: A copy between two devices of a host.
        add: The sum of two gradients on a device, as a pipeline accumulates them.
        reduce: The sum of the gradients of a variable over n devices of a host and its broadcast, by n: bytes are
            those of the variable.
        exchange: A sum over n devices for which the next one waits, by n.
        network: An all-reduce between two hosts.
        action_seconds: Seconds of a pipeline's action beyond its operations.
        num_cores: Cores of a host if its devices compute on them, as logical CPUs do; 0 for GPUs.
        cores_of_device: Cores on which an operation of one device runs.
        runtime_bytes: What TensorFlow itself takes of a device's memory.
        memory_bytes: Memory of a device; None for one that is not known.
        speed: Speed of a planned device relative to those measured.
        assumed: What is not measured but stated, in words: "memory 24 GiB", "bandwidth 10 GB/s".
    """

    device: str
    num_devices: int
    num_measured: int
    num_hosts: int = 1
    slowdown: Mapping[int, float] = dataclasses.field(default_factory=lambda: {1: 1.0})
    slowdown_of_stages: Mapping[int, float] = dataclasses.field(default_factory=dict)
    copy: Link = _UNMEASURED
    add: Link = _UNMEASURED
    reduce: Mapping[int, Link] = dataclasses.field(default_factory=dict)
    exchange: Mapping[int, Link] = dataclasses.field(default_factory=dict)
    network: Link = _UNMEASURED
    action_seconds: float = 0.0
    num_cores: int = 0
    cores_of_device: int = 1
    runtime_bytes: int = 0
    memory_bytes: int | None = None
    speed: float = 1.0
    assumed: tuple[str, ...] = ()


def variable_bytes_of(blocks: Iterable[BlockCost]) -> tuple[int, ...]:
    """Return the bytes of each trainable weight of some blocks.

    Example:
        >>> variable_bytes_of(BlockCost(name, Line(), Line(), 12, 12, variable_bytes=(8, 4)) for name in "ab")
        (8, 4, 8, 4)
    """
    return tuple(itertools.chain.from_iterable(block.variable_bytes for block in blocks))


def nearest(of_number: Mapping[int, Entry], number: int) -> Entry | None:
    """Return the entry of a number, else that of the next larger, else that of the largest; None for an empty table.

    Example:
        >>> nearest({2: 1.1, 4: 1.3}, 3), nearest({2: 1.1, 4: 1.3}, 8)
        (1.3, 1.3)
    """
    if not of_number:
        return None
    return of_number[min((key for key in of_number if key >= number), default=max(of_number))]


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """Return the line through measured seconds by least squares, with a start and a slope of at least 0.

    Args:
        sizes: Numbers of examples, at least one.
        seconds: The seconds at each.

    Example:
        >>> fitted([1, 3], [2.0, 4.0])
        Line(start_seconds=1.0, seconds_per_example=1.0)
    """
    mean_size, mean = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    if not spread:
        return Line(0.0, mean / mean_size)
    slope = sum((size - mean_size) * (one - mean) for size, one in zip(sizes, seconds, strict=True)) / spread
    slope = max(0.0, slope)
    start = mean - slope * mean_size
    return Line(start, slope) if start >= 0 else Line(0.0, mean / mean_size)

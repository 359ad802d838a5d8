"""The loss and the metrics that take the whole batch, between the forward and the backward passes of a step.

    replica 0   outputs of micro-batches 0 1 ─┐                                  ┌─► gradients 0 1   backward passes
                                              ├─ joined ─► loss, metrics ─ split ─┤
    replica 1   outputs of micro-batches 2 3 ─┘                                  └─► gradients 2 3   backward passes

The last stage of the first replica computes them, as one device does. Where there are several workers, each gathers the
outputs of all and computes the same; the first counts the value, and each keeps the gradients of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar.pipeline.execution.microbatches import HOST, host_of, rows_between
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.schedule_executor import Execution
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.loss.microbatch_loss import taken_after_stages
from tfpar.pipeline.stages.bundles import is_copied
from tfpar.pipeline.stages.values import MaskedTensor
from tfpar.reduction.whole_batch import not_dense


class _Part(NamedTuple):
    """The outputs of one micro-batch.

    Args:
        execution: That of its replica.
        number: Its index among the micro-batches of the replica.
        outputs: The outputs, on the device of the loss.
        num_rows: The number of rows of each output, int64 scalars; 0 for a repeated example.
    """

    execution: Execution
    number: int
    outputs: list[MaskedTensor]
    num_rows: list[tf.Tensor]


def compute_on_whole_batch(
    executions: Sequence[Execution], loss: StepLoss, peers: Peers | None, *, reads_inputs: bool
) -> None:
    """Compute the loss of all micro-batches and the metrics that take it, and give each its gradients.

    Args:
        executions: Those of this process, whose forward passes have run.
        loss: The loss of the first one.
        peers: The other workers of a job; None for none.
        reads_inputs: Whether an overridden method of the model takes the inputs of the whole batch.
    """
    first, *others = executions
    device = loss.compiled.device
    parts = [part for execution in executions for part in _parts(execution, device)]
    outputs = [_joined(parts, index, device) for index in range(len(parts[0].outputs))]
    examples = _examples(parts, loss.compiled.model, device)
    begins: Sequence[Any] = [tf.zeros([], tf.int64)] * len(outputs)
    if peers is not None:
        begins = _begins(outputs, peers, device)
        outputs = [MaskedTensor(*_gathered((one.tensor, one.mask), peers, device)) for one in outputs]
        inputs, *targets = examples
        examples = (_gathered(inputs, peers, device) if reads_inputs else inputs, *_gathered(targets, peers, device))
    whole = first.microbatches.whole(examples, host_of(device))
    gradients = loss.add_whole(whole, outputs, counts=peers is None or peers.rank == 0)
    for execution in others:  # the loss changes no state of theirs
        execution.variables.note_loss(0, execution.variables.loss_states(0), whole)
    _return_gradients(parts, gradients, begins, device)


def _parts(execution: Execution, device: str) -> list[_Part]:
    """Return the outputs of the micro-batches of a replica, on the device of the loss."""
    found = []
    for number, collected in enumerate(execution.outputs()):
        outputs = [output.on(device) for output in collected]
        sizes = [_num_rows(output.tensor, device) for output in outputs]
        with tf.device(HOST):
            counts = execution.microbatch(number, HOST).num_counted > 0
            sizes = [tf.where(counts, size, 0) for size in sizes]
        found.append(_Part(execution, number, outputs, sizes))
    return found


def _joined(parts: Sequence[_Part], index: int, device: str) -> MaskedTensor:
    """Return the counted rows of an output of all micro-batches."""
    rows = [(part.outputs[index], part.num_rows[index]) for part in parts]
    tensors = [_first_rows(output.tensor, num_rows, device) for output, num_rows in rows]
    masks = [_first_rows(output.mask, num_rows, device) for output, num_rows in rows if output.mask is not None]
    with tf.device(device):
        return MaskedTensor(tf.concat(tensors, 0), tf.concat(masks, 0) if masks else None)


def _num_rows(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """Return the number of rows of a tensor of a device, an int64 scalar in the memory of the host."""
    with tf.device(device):  # else the tensor is copied to the host
        shape = tf.shape(tensor, tf.int64)
    with tf.device(HOST):
        return shape[0]


def _first_rows(tensor: tf.Tensor, num_rows: tf.Tensor, device: str) -> tf.Tensor:
    return rows_between(tensor, tf.zeros([], tf.int64), num_rows, device)


def _examples(parts: Sequence[_Part], model: keras.Model, device: str) -> Any:
    """Return the counted examples of all micro-batches, as the loss takes them."""
    microbatches = [part.execution.microbatch(part.number, part.execution.devices[-1]) for part in parts]

    def joined(*leaves: Any) -> Any:
        rows = list(zip(leaves, microbatches, strict=True))
        if is_copied(leaves[0]):
            parts = [_first_rows(leaf, part.num_counted, device) for leaf, part in rows]
            with tf.device(device):
                return tf.concat(parts, 0)
        with tf.device(HOST):
            return data.join_batches([data.take_rows(leaf, 0, part.num_counted) for leaf, part in rows])

    return tf.nest.map_structure(joined, *(taken_after_stages(model, part.batch) for part in microbatches))


def _begins(outputs: Sequence[MaskedTensor], peers: Peers, device: str) -> list[tf.Tensor]:
    """Return the index of this worker's first row in each output of all workers, int64 scalars."""
    sizes = [_num_rows(output.tensor, device) for output in outputs]
    with tf.device(HOST):
        own = tf.stack(sizes)
        (of_workers,) = peers.add([tf.one_hot(peers.rank, peers.num_workers, dtype=tf.int64)[:, None] * own])
        begins: list[tf.Tensor] = tf.unstack(tf.reduce_sum(of_workers[: peers.rank], 0), num=len(outputs))
        return begins


def _gathered(structure: Any, peers: Peers, device: str) -> Any:
    """Return the rows of all workers of each tensor in a structure."""

    def gathered(tensor: Any) -> Any:
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
            raise not_dense("tensor of texts" if isinstance(tensor, tf.Tensor) else type(tensor).__name__)
        return peers.all_gather([tensor], device)[0]

    return tf.nest.map_structure(gathered, structure)


def _return_gradients(
    parts: Sequence[_Part], gradients: Sequence[Any], begins: Sequence[tf.Tensor], device: str
) -> None:
    """Give each micro-batch the rows of its examples; a repeated example has zeros."""
    begins = list(begins)
    for part in parts:
        of_part: list[Any] = []
        for index, gradient in enumerate(gradients):
            output, size = part.outputs[index].tensor, part.num_rows[index]
            with tf.device(HOST):
                end = begins[index] + size
            of_part.append(None if gradient is None else _rows_like(output, gradient, begins[index], end, device))
            begins[index] = end
        part.execution.receive(part.number, of_part)


def _rows_like(output: tf.Tensor, gradient: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, device: str) -> tf.Tensor:
    """Return rows of a gradient, with zeros to the number of rows of an output."""
    num_rows = _num_rows(output, device)
    with tf.device(HOST):
        missing = tf.stack(
            [tf.stack([0, num_rows - (end - begin)]), *[tf.zeros([2], tf.int64)] * len(output.shape[1:])]
        )
    with tf.device(device):
        padded = tf.pad(rows_between(gradient, begin, end, device), missing)
        return tf.ensure_shape(padded, output.shape)

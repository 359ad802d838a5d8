"""The loss and metrics of the whole batch, computed between the forward and backward passes of a step.

    replica 0   outputs of micro-batches 0 1 ─┐                                   ┌─► gradients 0 1   backward passes
                                              ├─ concat ─► loss, metrics ─ split ─┤
    replica 1   outputs of micro-batches 2 3 ─┘                                   └─► gradients 2 3   backward passes

They are computed on the last device of the first replica. With several workers, each gathers the outputs of all and
computes the same loss. The first worker counts its value, and each uses the gradients of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar.pipeline.execution.microbatches import HOST, host_of, rows_between
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.schedule_lowering import Execution
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.loss.microbatch_loss import last_stage_batch
from tfpar.pipeline.stages.bundles import is_copied
from tfpar.pipeline.stages.values import MaskedTensor
from tfpar.reduction.whole_batch import not_dense


class _MicrobatchOutputs(NamedTuple):
    """The outputs of one micro-batch.

    Args:
        execution: The execution of its replica.
        number: Its index among the micro-batches of the replica.
        outputs: The outputs, on the device of the loss.
        num_rows: The number of rows of each output that count, int64 scalars; 0 for a repeated example.
    """

    execution: Execution
    number: int
    outputs: list[MaskedTensor]
    num_rows: list[tf.Tensor]


def compute_whole_batch_loss(
    executions: Sequence[Execution], loss: StepLoss, peers: Peers | None, *, reads_inputs: bool
) -> None:
    """Compute the loss and metrics of the whole batch, and pass each micro-batch its gradients.

    Args:
        executions: The execution of each replica, after its forward passes.
        loss: The loss of the first replica.
        peers: The other workers, if the job has several.
        reads_inputs: Whether an overridden method of the model reads the inputs of the whole batch.
    """
    first, *others = executions
    device = loss.compiled.device
    microbatches = [outputs for execution in executions for outputs in _microbatch_outputs(execution, device)]
    outputs = [_concatenated(microbatches, index, device) for index in range(len(microbatches[0].outputs))]
    examples = _examples(microbatches, loss.compiled.model, device)
    begins: Sequence[Any] = [tf.zeros([], tf.int64)] * len(outputs)
    if peers is not None:
        begins = _begins(outputs, peers, device)
        outputs = [MaskedTensor(*_gathered((output.tensor, output.mask), peers, device)) for output in outputs]
        inputs, *targets = examples
        examples = (_gathered(inputs, peers, device) if reads_inputs else inputs, *_gathered(targets, peers, device))
    whole = first.microbatches.whole(examples, host_of(device))
    gradients = loss.add_whole(whole, outputs, counts=peers is None or peers.rank == 0)
    for execution in others:  # the loss does not change their states
        execution.variables.record_loss(0, execution.variables.loss_states(0), whole)
    _return_gradients(microbatches, gradients, begins, device)


def _microbatch_outputs(execution: Execution, device: str) -> list[_MicrobatchOutputs]:
    microbatches = []
    for number, collected in enumerate(execution.outputs()):
        outputs = [output.on(device) for output in collected]
        sizes = [_num_rows(output.tensor, device) for output in outputs]
        with tf.device(HOST):
            counts = execution.microbatch(number, HOST).num_counted > 0
            sizes = [tf.where(counts, size, 0) for size in sizes]
        microbatches.append(_MicrobatchOutputs(execution, number, outputs, sizes))
    return microbatches


def _concatenated(microbatches: Sequence[_MicrobatchOutputs], index: int, device: str) -> MaskedTensor:
    """Concatenate the rows of an output that count over all micro-batches."""
    rows = [(microbatch.outputs[index], microbatch.num_rows[index]) for microbatch in microbatches]
    tensors = [_first_rows(output.tensor, num_rows, device) for output, num_rows in rows]
    masks = [_first_rows(output.mask, num_rows, device) for output, num_rows in rows if output.mask is not None]
    with tf.device(device):
        return MaskedTensor(tf.concat(tensors, 0), tf.concat(masks, 0) if masks else None)


def _num_rows(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """Return the number of rows of a tensor on a device, an int64 scalar on the host."""
    with tf.device(device):  # otherwise the tensor is copied to the host
        shape = tf.shape(tensor, tf.int64)
    with tf.device(HOST):
        return shape[0]


def _first_rows(tensor: tf.Tensor, num_rows: tf.Tensor, device: str) -> tf.Tensor:
    return rows_between(tensor, tf.zeros([], tf.int64), num_rows, device)


def _examples(outputs: Sequence[_MicrobatchOutputs], model: keras.Model, device: str) -> Any:
    """Concatenate the examples that count over all micro-batches, as arguments of the loss."""
    microbatches = [entry.execution.microbatch(entry.number, entry.execution.devices[-1]) for entry in outputs]

    def concatenated(*leaves: Any) -> Any:
        rows = list(zip(leaves, microbatches, strict=True))
        if is_copied(leaves[0]):
            tensors = [_first_rows(leaf, microbatch.num_counted, device) for leaf, microbatch in rows]
            with tf.device(device):
                return tf.concat(tensors, 0)
        with tf.device(HOST):
            return data.join_batches([data.take_rows(leaf, 0, microbatch.num_counted) for leaf, microbatch in rows])

    batches = (last_stage_batch(model, microbatch.batch) for microbatch in microbatches)
    return tf.nest.map_structure(concatenated, *batches)


def _begins(outputs: Sequence[MaskedTensor], peers: Peers, device: str) -> list[tf.Tensor]:
    """Return the index of this worker's first row in each output gathered from all workers, int64 scalars."""
    sizes = [_num_rows(output.tensor, device) for output in outputs]
    with tf.device(HOST):
        own_sizes = tf.stack(sizes)
        (all_sizes,) = peers.add([tf.one_hot(peers.rank, peers.num_workers, dtype=tf.int64)[:, None] * own_sizes])
        begins: list[tf.Tensor] = tf.unstack(tf.reduce_sum(all_sizes[: peers.rank], 0), num=len(outputs))
        return begins


def _gathered(structure: Any, peers: Peers, device: str) -> Any:
    """All-gather the rows of each tensor in a structure over workers."""

    def gathered(tensor: Any) -> Any:
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
            raise not_dense("tensor of texts" if isinstance(tensor, tf.Tensor) else type(tensor).__name__)
        return peers.all_gather([tensor], device)[0]

    return tf.nest.map_structure(gathered, structure)


def _return_gradients(
    microbatches: Sequence[_MicrobatchOutputs], gradients: Sequence[Any], begins: Sequence[tf.Tensor], device: str
) -> None:
    """Pass each micro-batch the gradients of its rows, and zeros for repeated examples."""
    begins = list(begins)
    for microbatch in microbatches:
        own_gradients: list[Any] = []
        for index, gradient in enumerate(gradients):
            output, size = microbatch.outputs[index].tensor, microbatch.num_rows[index]
            with tf.device(HOST):
                end = begins[index] + size
            own_gradients.append(None if gradient is None else _rows_like(output, gradient, begins[index], end, device))
            begins[index] = end
        microbatch.execution.save_output_gradients(microbatch.number, own_gradients)


def _rows_like(output: tf.Tensor, gradient: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, device: str) -> tf.Tensor:
    """Return rows of a gradient, padded with zeros to the number of rows of an output."""
    num_rows = _num_rows(output, device)
    with tf.device(HOST):
        missing = tf.stack(
            [tf.stack([0, num_rows - (end - begin)]), *[tf.zeros([2], tf.int64)] * len(output.shape[1:])]
        )
    with tf.device(device):
        padded = tf.pad(rows_between(gradient, begin, end, device), missing)
        return tf.ensure_shape(padded, output.shape)

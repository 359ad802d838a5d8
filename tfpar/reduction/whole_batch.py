"""What a model's `call` asks of the whole batch while a replica has only its part of it.

    run on the whole batch      recorded:   loss 0.37, rows a b c d
    run on a part of it         replayed:   loss 0.37, rows a b c d      so that only the part differs

Before the first step a trial runs a model on a batch and on its parts. What `call` computes on the whole batch is the
same under every strategy with replicas, so the trial gives it to the parts too.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat import keras_losses
from tfpar.reduction.losses import BatchWeights, dense_losses, loss_sums
from tfpar.reduction.replicas import local_replica_id, replica_id, sum_over_replicas


class Rows(abc.ABC):
    """How the rows of the whole batch are known while a model is called on some of them."""

    @abc.abstractmethod
    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the whole batch for those at hand."""

    @abc.abstractmethod
    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the rows at hand of those of the whole batch."""


# The last one counts. Not by thread: the replicas of MirroredStrategy are threads.
_rows: list[Rows] = []


@contextlib.contextmanager
def knowing(rows: Rows) -> Iterator[None]:
    """Let `gather` and `own_rows` do as `rows` does inside this context."""
    _rows.append(rows)
    try:
        yield
    finally:
        _rows.pop()


def gather(tensor: Any) -> Any:
    """Return a tensor's rows for the whole global batch, inside a layer, a loss or an objective.

    Use it where an example depends on the others of its batch: a contrastive loss, statistics of a batch. Every replica
    gets the same rows in the order of the batch, and gradients flow back to the replica that each row is from, so that
    the result is that of one device. On one device it returns its argument.

    Args:
        tensor: `[examples, ...]`, one row for each example that the layer was called with.

    Returns:
        `[examples of the global batch, ...]`.

    Example:
        >>> class Centered(keras.layers.Layer):
        ...     def call(self, inputs):
        ...         return inputs - keras.ops.mean(tfpar.gather(inputs), axis=0)
    """
    return _rows[-1].gather(tf.convert_to_tensor(tensor)) if _rows else tensor


def own_rows(tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
    """Return the rows of a tensor of the whole batch that belong to the calling replica.

    Args:
        tensor: `[examples of the global batch, ...]`.
        num_rows: How many examples the replica was called with.
    """
    return _rows[-1].own(tensor, num_rows) if _rows else tensor


class Trial(Rows):
    """Values of the whole batch, recorded in one run of a model and replayed in others.

    Example:
        >>> trial = Trial()
        >>> with trial.recording():
        ...     whole = model(batch)
        >>> with trial.replaying(start=0):
        ...     part = model(part_of_batch)
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._replayed: Iterator[Any] | None = None
        self._start = 0

    @property
    def num_values(self) -> int:
        """How many values were recorded."""
        return len(self._values)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside this context what a model's `call` computes on the whole batch."""
        self._values, self._replayed = [], None
        with keras_losses.losses_in_call(self._loss), knowing(self):
            yield

    @contextlib.contextmanager
    def replaying(self, start: int) -> Iterator[None]:
        """Return the recorded values in their order inside this context.

        Args:
            start: The number of the part's first example.
        """
        self._replayed, self._start = iter(self._values), start
        with keras_losses.losses_in_call(self._loss), knowing(self):
            yield

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the recorded rows."""
        return self._value(lambda: tensor)

    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of the part."""
        return tensor if self._replayed is None else tensor[self._start : self._start + num_rows]

    def _loss(self, *loss: Any) -> Any:
        if not reduces(*loss):
            return keras_losses.reduce_of_these(*loss)
        return self._value(lambda: keras_losses.reduce_of_these(*loss))

    def _value(self, compute: Callable[[], Any]) -> Any:
        if self._replayed is not None:
            return next(self._replayed)
        self._values.append(compute())
        return self._values[-1]


class RowsOfReplicas(Rows):
    """The rows of the whole batch, each on the replica that has it.

    Args:
        counted: How many of its examples each local replica counts.
        share: What an example counts: less than 1 where several replicas have the same examples.
        num_replicas: Of all workers.
        num_examples: The size of the global batch; None where no worker knows it.
    """

    def __init__(
        self, counted: Sequence[tf.Tensor], share: tf.Tensor, num_replicas: int, num_examples: tf.Tensor | None
    ) -> None:
        self._counted, self._share, self._num_replicas = counted, share, num_replicas
        self._num_examples = num_examples

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Add up tensors of the whole batch's size, in which each replica has only its own rows, others zero."""
        start, total = self._place()
        count = tf.cast(self._counted[local_replica_id()], tf.int64)
        shape = tf.concat([total[None], tf.shape(tensor, tf.int64)[1:]], 0)
        summable = tf.cast(tensor, tf.int32) if tensor.dtype.is_bool else tensor
        places = (start + tf.range(count))[:, None]
        whole = sum_over_replicas(tf.scatter_nd(places, summable[:count], shape))
        return tf.ensure_shape(tf.cast(whole, tensor.dtype), [None, *tensor.shape[1:]])

    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the replica's rows."""
        start, total = self._place()
        # Without any examples it has a stand-in, which is nowhere in the batch.
        return tf.gather(tensor, tf.minimum(start + tf.range(tf.cast(num_rows, tf.int64)), total - 1))

    def _place(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the number of the replica's first row in the whole batch, and how many rows that has."""
        index, replica = replica_id(), local_replica_id()
        if self._num_examples is not None:
            total = tf.cast(self._num_examples, tf.int64)
            return tf.where(self._share < 1, tf.zeros_like(total), -(-index * total // self._num_replicas)), total
        counts = sum_over_replicas(
            tf.one_hot(index, self._num_replicas, dtype=tf.int64) * tf.cast(self._counted[replica], tf.int64)
        )
        # Replicas with the same examples are those of one worker, and its first counts them.
        first = tf.where(self._share < 1, index - replica, index)
        return tf.reduce_sum(counts[:first]), tf.reduce_sum(counts)


@contextlib.contextmanager
def losses_in_call(counts: Callable[[], BatchWeights]) -> Iterator[None]:
    """Let every loss that a model's `call` computes inside this context be that of the whole batch.

    Its gradient is that of the whole batch as well, whatever a replica does with the value.

    Args:
        counts: Returns how many examples there are, on the calling replica and in all.
    """

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        loss = values, sample_weight, mask, reduction, dtype
        if not reduces(*loss):
            return keras_losses.reduce_of_these(*loss)
        share = tf.cast(counts().example_weight, dtype)
        total, weight = loss_sums(
            tf.convert_to_tensor(dense_losses(values, reduction), dtype), sample_weight, mask, reduction or "", dtype
        )
        if weight is None:
            return sum_over_replicas(share * total)
        # Not counted from the number of examples: a layer may leave some values out, or compute weights.
        return tf.math.divide_no_nan(*tf.unstack(sum_over_replicas(share * tf.stack([total, weight]))))

    with keras_losses.losses_in_call(reduce):
        yield


def reduces(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> bool:
    """Say whether Keras makes a scalar of a loss that is none yet; its arguments are those of Keras' reduction."""
    return reduction not in (None, "none") and len(values.shape) > 0

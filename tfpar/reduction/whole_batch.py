"""Values of the whole batch in a model's `call`: all-gathered on replicas, recorded and replayed in a study.

    run on the whole batch      recorded:   loss 0.37, rows a b c d
    run on a part of it         replayed:   loss 0.37, rows a b c d

Replicas compute gathered rows, and losses in a model's `call`, on the whole batch. The study, which runs the model on a
batch and on its parts before the first step, therefore replays the values of the batch for the parts.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.models import keras_losses_in_call, keras_model
from tfpar.data.batching.batches import first_rows
from tfpar.reduction import text_bytes
from tfpar.reduction.gradients import row_numbers
from tfpar.reduction.losses import ALONE, BatchWeights
from tfpar.reduction.partial_sums import PartialSums, sums_of
from tfpar.reduction.replicas import local_replica_id, replica_id, sum_over_replicas

AllGather = Callable[[tf.Tensor], tf.Tensor]


class RowSource(abc.ABC):
    """Provides the rows of the whole batch to a call on a part of it."""

    @abc.abstractmethod
    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the whole batch, given those of the part."""

    def gather_without_gradient(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the same rows for a caller that computes the gradient itself."""
        return self.gather(tensor)

    @abc.abstractmethod
    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of the part, given those of the whole batch."""


# The last one is active. Not thread-local, because the replicas of MirroredStrategy are threads.
_rows: list[RowSource] = []


class _OfThread(threading.local):
    has_all_rows = False
    counts_once = False


_of_thread = _OfThread()


@contextlib.contextmanager
def using_rows(rows: RowSource) -> Iterator[None]:
    """Use `rows` for `gather` and `own_rows` in this context."""
    _rows.append(rows)
    try:
        yield
    finally:
        _rows.pop()


def gather(tensor: Any) -> Any:
    """All-gather the rows of a tensor over the global batch, inside a layer, a loss or an objective.

    Use it where examples depend on each other, as in a contrastive loss or batch statistics. The rows are in the order
    of the global batch, and the gradient of each row returns to its replica, so the result equals that of one device.
    On one device the tensor is returned unchanged.

    Args:
        tensor: `[examples, ...]`, one row for each example of the call.

    Returns:
        `[examples of the global batch, ...]`.

    Example:
        >>> class Centered(keras.layers.Layer):
        ...     def call(self, inputs):
        ...         return inputs - keras.ops.mean(tfpar.gather(inputs), axis=0)
    """
    if not _rows or _of_thread.has_all_rows:
        return tensor
    return row_numbers.of_all_replicas(_rows[-1].gather(tf.convert_to_tensor(tensor)))


@contextlib.contextmanager
def holding_all_rows(*, counts_once: bool = False) -> Iterator[None]:
    """Let `gather` return its argument in this replica's thread, because the call has the whole batch already.

    Args:
        counts_once: Whether this replica alone counts metrics; otherwise each replica counts its share.
    """
    before = _of_thread.has_all_rows, _of_thread.counts_once
    _of_thread.has_all_rows, _of_thread.counts_once = True, counts_once
    try:
        yield
    finally:
        _of_thread.has_all_rows, _of_thread.counts_once = before


def has_all_rows() -> bool:
    """Return whether this thread is inside `holding_all_rows`."""
    return _of_thread.has_all_rows


def weight_of_scalar(share: tf.Tensor) -> tf.Tensor | None:
    """Return the weight of a scalar in a metric: the replica's share of the batch; None if it counts all of it."""
    return None if _of_thread.counts_once else share


def gather_for_loss(structure: Any, counts: BatchWeights = ALONE) -> Any:
    """Gather the arguments of a loss or metric over the whole batch, with their Keras masks.

    Each replica then computes the loss of the whole batch, and `share_of` scales it to the replica's share. The
    gradient of a row is not scaled, because only its own replica has it.

    Args:
        structure: Tensors `[rows, ...]` of the calling replica, or None.
        counts: The sizes of the per-replica and the global batch; unused without a gradient.

    Raises:
        ValueError: If a tensor is ragged or sparse.
    """

    def gathered(tensor: Any) -> Any:
        if tensor is None:
            return None
        if not isinstance(tensor, tf.Tensor):
            raise not_dense(type(tensor).__name__)
        mask = keras_model.mask_of(tensor)
        rows = _for_loss(tensor, counts)
        return rows if mask is None else keras_model.with_mask(rows, _rows[-1].gather(tf.convert_to_tensor(mask)))

    return tf.nest.map_structure(gathered, structure)


def not_dense(kind: str) -> ValueError:
    """Return the error for a tensor that a loss or metric of the whole batch cannot gather."""
    return ValueError(
        "A loss or a metric that needs the whole batch gathers dense tensors, "
        f"received a {kind}. Use to_tensor(), or train on SingleDevice()."
    )


def _for_loss(tensor: tf.Tensor, counts: BatchWeights) -> tf.Tensor:
    """Return the rows of the whole batch; the calling replica has the gradient of its own rows only."""
    rows = _rows[-1]
    if not tensor.dtype.is_floating:
        return rows.gather_without_gradient(tensor)
    shape = tf.shape(tensor, tf.int64)

    @tf.custom_gradient
    def gathered(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def back(upstream: tf.Tensor) -> tf.Tensor:
            weight = tf.cast(counts.example_weight, upstream.dtype)
            return tf.math.divide_no_nan(rows.own(upstream, shape[0]) * weight, _share(counts, upstream.dtype))

        return rows.gather_without_gradient(own), back

    return gathered(tensor)


def share_of(loss: tf.Tensor, counts: BatchWeights) -> tf.Tensor:
    """Return the replica's share of a loss of the whole batch, or the loss with the gradient of that share.

    Args:
        loss: The scalar loss of rows from `gather_for_loss`.
        counts: The sizes of the per-replica and the global batch.
    """
    share = loss * _share(counts, loss.dtype)
    return share if counts.partial_values else share + tf.stop_gradient(loss - share)


def _share(counts: BatchWeights, dtype: tf.DType) -> tf.Tensor:
    """Return the fraction of the whole batch that the calling replica has."""
    own = tf.cast(counts.example_weight, dtype) * tf.cast(counts.local_size, dtype)
    return own / counts.size_of_all(dtype)


def own_rows(tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
    """Return the calling replica's `num_rows` rows of a tensor `[examples of the global batch, ...]`."""
    return row_numbers.of_each_replica(_rows[-1].own(tensor, num_rows)) if _rows else tensor


class Recording(RowSource):
    """Values of the whole batch, recorded in one run of a model and replayed in runs on its parts.

    Args:
        gathers: Whether `tfpar.gather` returns the rows of the whole batch, as on replicas, or of the micro-batch, as
            in a pipeline.
        replays_losses: Whether losses in `call` are those of the whole batch, or of the part, as in a model with an
            overridden `compute_loss`.

    Example:
        >>> recording = Recording()
        >>> with recording.recording(num_examples=8):
        ...     whole = model(batch)
        >>> with recording.replaying(start=0):
        ...     part = model(part_of_batch)
    """

    def __init__(self, gathers: bool = True, replays_losses: bool = True) -> None:
        self._gathers, self._replays_losses = gathers, replays_losses
        self._values: list[Any] = []
        self._replayed: Iterator[Any] | None = None
        self._start = self._num_examples = 0
        self._sums: list[PartialSums] = []
        self._summed: Iterator[PartialSums] = iter(())

    @contextlib.contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """Record the values that a model's `call` computes on a whole batch of `num_examples` in this context."""
        self._num_examples = num_examples
        self._values, self._replayed, self._sums = [], None, []
        with self._losses_in_call(), using_rows(self):
            yield

    @contextlib.contextmanager
    def replaying(self, start: int) -> Iterator[None]:
        """Replay the recorded values, in order, for a part that begins with example `start`."""
        self._replayed, self._summed, self._start = iter(self._values), iter(self._sums), start
        with self._losses_in_call(), using_rows(self):
            yield

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the recorded rows; only the part's own rows have a gradient, as on a replica.

        Raises:
            ValueError: If the tensor does not have one row for each example.
        """
        if not self._gathers:
            return tensor
        if self._replayed is None and not tensor.shape[:1].is_compatible_with([self._num_examples]):
            raise ValueError(
                "tfpar.gather takes one row for each example of a batch, received a tensor of shape "
                f"{tensor.shape} for {self._num_examples} examples. Reshape it to [examples, ...] before, and the "
                "result after."
            )
        whole = self._value(lambda: tensor)
        if self._replayed is None or not tensor.dtype.is_floating:
            return whole
        rows = tf.range(self._start, self._start + tf.shape(tensor)[0])[:, None]
        own = tf.scatter_nd(rows, tensor, tf.shape(whole))
        return tf.stop_gradient(whole - own) + own

    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of the part."""
        return tensor if self._replayed is None else tensor[self._start : self._start + num_rows]

    @property
    def gathered(self) -> bool:
        """Whether the run on the whole batch has gathered rows."""
        return bool(self._values)

    @property
    def losses(self) -> list[PartialSums]:
        """The losses that `call` computed, in order."""
        return self._sums

    def _losses_in_call(self) -> contextlib.AbstractContextManager[None]:
        of_part = keras_losses_in_call.losses_in_call
        return of_part(self._loss) if self._replays_losses else of_part()

    def _loss(self, *loss: Any) -> Any:
        sums = sums_of(loss)
        if sums is None:
            return keras_losses_in_call.reduce_of_these(*loss)
        if self._replayed is None:
            self._sums.append(PartialSums(loss[3] == "sum", sums))
        else:
            next(self._summed).add(sums)
        own = keras_losses_in_call.reduce_of_these(*loss)
        return _with_value(own, self._value(lambda: own))

    def _value(self, compute: Callable[[], Any]) -> Any:
        if self._replayed is not None:
            return next(self._replayed)
        self._values.append(compute())
        return self._values[-1]


@tf.custom_gradient
def _with_value(own: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, None]]]:
    """Return `value` with the gradient of `own`."""
    return tf.identity(value), lambda upstream: (upstream, None)


class ReplicaRows(RowSource):
    """The rows of the whole batch, distributed over the replicas.

    Args:
        num_counted: For each local replica, the number of its examples to count.
        example_weight: The weight of an example; less than 1 if several replicas have the same examples.
        shares: Relative size of the per-replica batch of each replica, on all workers.
        num_examples: The size of the global batch; None if no worker knows it.
        all_gather: Concatenates the rows of all replicas, in order; None sums tensors of the size of the whole batch.
    """

    def __init__(
        self,
        num_counted: Sequence[tf.Tensor],
        example_weight: tf.Tensor,
        shares: Sequence[int],
        num_examples: tf.Tensor | None,
        all_gather: AllGather | None = None,
    ) -> None:
        self._num_counted, self._example_weight, self._shares = num_counted, example_weight, shares
        self._num_examples, self._all_gather = num_examples, all_gather

    def gather_without_gradient(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the whole batch by an all-gather, which sends half the bytes of a sum."""
        if self._all_gather is None or tensor.dtype == tf.string:
            return self.gather(tensor)
        rows = tensor[: tf.cast(self._num_counted[local_replica_id()], tf.int64)]
        return tf.ensure_shape(self._all_gather(rows), [None, *tensor.shape[1:]])

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum tensors of the size of the whole batch, in which each replica fills its own rows.

        If several replicas have the same examples, one fills the rows, and each receives its share of the gradient, as
        it has its share of the loss.
        """
        if tensor.dtype == tf.string:
            return self._texts(tensor)
        start, total = self._place()
        shape_here = tf.shape(tensor, tf.int64)
        summable = tf.cast(tensor, tf.int32) if tensor.dtype.is_bool else tensor
        with tf.device("CPU:0"):  # the host would wait for sizes on a GPU
            count = tf.cast(self._num_counted[local_replica_id()], tf.int64)
            shape = tf.concat([total[None], shape_here[1:]], 0)
            places = (start + tf.range(count))[:, None]

        @tf.custom_gradient
        def filled(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(upstream: tf.Tensor) -> tf.Tensor:
                return self.own(upstream, shape_here[0]) * tf.cast(self._example_weight, upstream.dtype)

            return tf.scatter_nd(places, rows[:count], shape), back

        whole = sum_over_replicas(filled(summable))
        return tf.ensure_shape(tf.cast(whole, tensor.dtype), [None, *tensor.shape[1:]])

    def _texts(self, texts: tf.Tensor) -> tf.Tensor:
        """Return the texts of the whole batch, summed as codes."""
        length = tf.one_hot(replica_id(), len(self._shares), dtype=tf.int32) * text_bytes.longest(texts)
        num_bytes = tf.reduce_max(sum_over_replicas(length))
        return text_bytes.decode(self.gather(text_bytes.encode(texts, num_bytes)))

    def own(self, tensor: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of the calling replica."""
        start, total = self._place()
        with tf.device("CPU:0"):
            # A padding batch has no rows in the whole batch.
            places = tf.minimum(start + tf.range(tf.cast(num_rows, tf.int64)), total - 1)
        return tf.gather(tensor, places)

    def _place(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the index of the replica's first row in the whole batch, and the size of the whole batch."""
        index, replica = replica_id(), local_replica_id()
        if self._num_examples is not None:
            with tf.device("CPU:0"):
                total = tf.cast(self._num_examples, tf.int64)
                start = first_rows(total, self._shares)[index]
                return tf.where(self._example_weight < 1, tf.zeros_like(total), start), total
        counts = sum_over_replicas(
            tf.one_hot(index, len(self._shares), dtype=tf.int64) * tf.cast(self._num_counted[replica], tf.int64)
        )
        # Only replicas of one worker can have the same examples; the first of them counts.
        first = tf.where(self._example_weight < 1, index - replica, index)
        return tf.reduce_sum(counts[:first]), tf.reduce_sum(counts)


class RowsForMeans(ReplicaRows):
    """Rows for losses that each replica computes as a mean over its examples, weighted by their fraction in the end.

    The gradient of a gathered row is the sum over the losses of all replicas with these weights. It is divided by the
    weight of the row's replica, which the replica's gradients are multiplied by later.

    Args:
        *arguments: As for `ReplicaRows`.
        fraction: Returns the fraction of the calling replica's examples in the global batch.
        **settings: As for `ReplicaRows`.
    """

    def __init__(self, *arguments: Any, fraction: Callable[[], tf.Tensor], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._fraction = fraction

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of the whole batch."""
        if not tensor.dtype.is_floating:
            return super().gather(tensor)
        fraction = tf.cast(self._fraction(), tensor.dtype)
        divisor = fraction * tf.cast(self._example_weight, tensor.dtype)
        rows = super().gather(_with_scaled_gradient(tensor, tf.math.divide_no_nan(tf.ones_like(divisor), divisor)))
        return _with_scaled_gradient(rows, fraction)


def _with_scaled_gradient(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def scaled(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda upstream: upstream * factor

    return scaled(tensor)


@contextlib.contextmanager
def losses_in_call(counts: Callable[[], BatchWeights]) -> Iterator[None]:
    """Compute every loss in a model's `call` over the whole batch in this context, with the gradient of the whole.

    Args:
        counts: Returns the sizes of the calling replica's batch and of the global batch.
    """

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        loss = values, sample_weight, mask, reduction, dtype
        sums = sums_of(loss)
        if sums is None:
            return keras_losses_in_call.reduce_of_these(*loss)
        example_weight = tf.cast(counts().example_weight, dtype)
        if reduction == "sum":
            return sum_over_replicas(example_weight * sums[0])
        # Not from the number of examples: a layer may drop values or compute weights.
        return tf.math.divide_no_nan(*tf.unstack(sum_over_replicas(example_weight * tf.stack(sums))))

    with keras_losses_in_call.losses_in_call(reduce):
        yield

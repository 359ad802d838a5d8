"""What a model's `call` asks of the whole batch while a replica has only its part of it.

    run on the whole batch      recorded:   loss 0.37
    run on a part of it         replayed:   loss 0.37      so that only the part differs

Before the first step a trial runs a model on a batch and on its parts. A loss that `call` computes is that of the
whole batch under every strategy with replicas, so the trial gives it to the parts too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar import _compat_losses
from tfpar.reduction import Counts, loss_sums, sum_over_replicas


class Trial:
    """Values of the whole batch, recorded in one run of a model and replayed in others.

    Example:
        >>> trial = Trial()
        >>> with trial.recording():
        ...     whole = model(batch)
        >>> with trial.replaying():
        ...     part = model(part_of_batch)
    """

    def __init__(self) -> None:
        self._values: list[Any] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the losses that a model's `call` computes inside this context."""
        self._values = []

        def record(*loss: Any) -> Any:
            value = _compat_losses.reduce_of_these(*loss)
            if _reduces(*loss):
                self._values.append(value)
            return value

        with _compat_losses.losses_in_call(record):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Return the recorded values in their order inside this context."""
        values = iter(self._values)

        def replay(*loss: Any) -> Any:
            return next(values) if _reduces(*loss) else _compat_losses.reduce_of_these(*loss)

        with _compat_losses.losses_in_call(replay):
            yield


@contextlib.contextmanager
def losses_in_call(counts: Callable[[], Counts]) -> Iterator[None]:
    """Let every loss that a model's `call` computes inside this context be that of the whole batch.

    Its gradient is that of the whole batch as well, whatever a replica does with the value.

    Args:
        counts: Returns how many examples there are, on the calling replica and in all.
    """

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> Any:
        loss = values, sample_weight, mask, reduction, dtype
        if not _reduces(*loss):
            return _compat_losses.reduce_of_these(*loss)
        share = tf.cast(counts().share, dtype)
        total, weight = loss_sums(tf.convert_to_tensor(values, dtype), sample_weight, mask, reduction or "", dtype)
        if weight is None:
            return sum_over_replicas(share * total)
        # Not counted from the number of examples: a layer may leave some values out, or compute weights.
        return tf.math.divide_no_nan(*tf.unstack(sum_over_replicas(share * tf.stack([total, weight]))))

    with _compat_losses.losses_in_call(reduce):
        yield


def _reduces(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> bool:
    return reduction not in (None, "none") and len(values.shape) > 0

"""Batches from Python code: a `keras.utils.PyDataset`, a generator or a torch `DataLoader`."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_data_adapters
from tfpar.data.batching.batches import map_batches
from tfpar.messages import user_warnings

EMPTY = "A dataset must yield at least one batch, but this one is empty. Check its source, filters and splits."
# Keras' own words, which users search for.
RAN_OUT = (
    "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at least "
    "`steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your dataset."
)


class PythonBatches:
    """Global batches from Python code, read in the same sequence of calls as by `keras.Model.fit`.

    Two batches are read for their shapes, then `on_epoch_end` is called. Every epoch then consists of `on_epoch_begin`,
    the batches and `on_epoch_end`, so that a dataset that shuffles itself has the same order as in Keras.

        [0] [1] on_epoch_end │ on_epoch_begin [0] [1] [2] … on_epoch_end │ on_epoch_begin …

    Args:
        x: A PyDataset, a generator of tuples, a torch `DataLoader`, a grain dataset, or a data adapter of Keras.
        y: Must be None, because the batches contain the targets.
        sample_weight: Must be None, because the batches contain the weights.
        class_weight: Weight of each class; for a PyDataset only.
        shuffle: Whether to shuffle a PyDataset of known length in each pass, in the same order as Keras: drawn from
            Python's `random` in Keras 3.15, seeded with the epoch in Keras 3.16.

    Raises:
        ValueError: If Keras refuses the arguments, there is no batch, or a batch has no batch axis.

    >>> numbers = PythonBatches((np.full([2], number),) for number in range(3))
    >>> [batch.numpy().tolist() for (batch,) in numbers.dataset]
    [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = False,
    ) -> None:
        self._made_of = (x, class_weight, shuffle)
        self._adapter = keras_data_adapters.adapter(x, y, sample_weight, class_weight, shuffle)
        self._shuffles = bool(getattr(self._adapter, "shuffle", False))
        self._once = isinstance(x, types.GeneratorType)
        self.num_batches: int | None = self._adapter.num_batches
        peeked = keras_data_adapters.peek(self._adapter)
        if peeked:
            packing = _Packing(peeked)
            self.first = packing.dataset(lambda: iter(peeked[:1]))
            self.dataset = packing.dataset(lambda: keras_data_adapters.batches_of(self._adapter)).prefetch(1)
        elif self.num_batches == 0:
            raise ValueError(EMPTY)
        else:
            self.dataset = _without_optionals(self._adapter.get_tf_dataset())
            self.first = self.dataset.take(1)

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, as in `tf.data.Dataset.element_spec`."""
        return self.dataset.element_spec

    def is_made_of(self, x: Any, class_weight: Mapping[int, float] | None, shuffle: bool) -> bool:
        """Return whether these batches were made from the same arguments, and can be reused."""
        return self._made_of[0] is x and self._made_of[1:] == (class_weight, shuffle)

    def start(self, broadcast: Callable[[bytes], bytes]) -> None:
        """Call the hooks that Keras calls before the first epoch.

        Args:
            broadcast: Sends the chief's random state to every worker, so that all shuffle in the same order.
        """
        keras_data_adapters.begin_training(self._adapter)
        if self._shuffles:
            state = json.dumps(random.getstate())
            version, numbers, gauss = json.loads(broadcast(state.encode()))
            random.setstate((version, tuple(numbers), gauss))

    def begin_epoch(self) -> None:
        """Call the source's `on_epoch_begin`."""
        self._source.on_epoch_begin()

    def end_epoch(self) -> None:
        """Call the source's `on_epoch_end`."""
        self._source.on_epoch_end()
        keras_data_adapters.count_epoch(self._adapter)

    def begin_pass(self, again: bool) -> None:
        """Prepare a pass over the batches; warn if a generator is read again."""
        self.stop()
        if again and self._once:
            user_warnings.warn(RAN_OUT)

    def skip_pass(self, epochs: int) -> None:
        """Advance the random state by one pass without reading batches, so that the next pass has its own order.

        Args:
            epochs: Number of epochs that begin in the pass.
        """
        for epoch in range(epochs):
            self.begin_epoch()
            if self._shuffles and epoch == 0:
                keras_data_adapters.skip_order(self._adapter)
            self.end_epoch()

    def resume(self, batches: int) -> None:
        """Warn that a generator cannot return to a position, so that `batches` batches are read and skipped."""
        if self._once:
            user_warnings.warn(
                f"A generator cannot return to a position: its first {batches} batches are read and skipped. Pass a "
                "new generator that yields the same batches again. A keras.utils.PyDataset can return to a position."
            )

    def stop(self) -> None:
        """Stop the threads or processes that read ahead."""
        keras_data_adapters.stop_workers(self._adapter)

    @property
    def _source(self) -> Any:
        # The adapter of a PyDataset would also stop its workers during a pass of several epochs.
        return getattr(self._adapter, "py_dataset", self._adapter)


class _Packing:
    """Converts batches to flat tuples without None, which `tf.data.Dataset.from_generator` accepts, and back."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._structure = keras.tree.lists_to_tuples(batches[0])
        self._present = [leaf is not None for leaf in tf.nest.flatten(self._structure)]
        self._specs = tuple(keras_data_adapters.spec_of([self._flat(batch) for batch in batches]))

    def dataset(self, batches: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
        def flat() -> Iterator[Any]:
            return map(self._flat, batches())

        return tf.data.Dataset.from_generator(flat, output_signature=self._specs).map(
            tf.autograph.experimental.do_not_convert(self._packed)
        )

    def _flat(self, batch: Any) -> tuple[Any, ...]:
        leaves = tf.nest.flatten(keras.tree.lists_to_tuples(batch))
        if [leaf is not None for leaf in leaves] != self._present:
            raise ValueError(
                "Every batch must have the same structure, with None in the same places. The first is "
                f"{_shapes(self._structure)}, but a later one is {_shapes(batch)}."
            )
        leaves = [leaf for leaf in leaves if leaf is not None]
        if any(len(getattr(leaf, "shape", np.shape(leaf))) == 0 for leaf in leaves):
            raise ValueError(
                f"Every array of a batch must have a first axis over its examples, but a batch is {_shapes(batch)}. "
                "Yield whole batches of the global batch size, not single examples."
            )
        return tuple(map(keras_data_adapters.to_tensorflow, leaves))

    def _packed(self, *leaves: Any) -> Any:
        remaining = iter(leaves)
        filled = [next(remaining) if present else None for present in self._present]
        return tf.nest.pack_sequence_as(self._structure, filled)


def _shapes(batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else tuple(np.shape(leaf)), batch)


def _without_optionals(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Replace the empty optionals of Keras' adapters by None."""
    specs = tf.nest.flatten(dataset.element_spec)
    if not any(isinstance(spec, tf.OptionalSpec) for spec in specs):
        return dataset

    def change(batch: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)

    return map_batches(dataset, change, num_parallel_calls=None)

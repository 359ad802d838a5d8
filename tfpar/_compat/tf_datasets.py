"""What a `tf.data.Dataset` was made with. Written for TensorFlow 2.21."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.data.ops import shard_op, shuffle_op

from tfpar._compat import tf_graph, versions

_Shard, _Shuffle = versions.private(shard_op, "_ShardDataset"), versions.private(shuffle_op, "_ShuffleDataset")


def shards_and_seeds(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yield a text for each `shard` and `shuffle` of a dataset, its last one first.

    Not for those inside of the function of an `interleave` or a `flat_map`.

    Args:
        dataset: Any dataset.

    Example:
        >>> list(shards_and_seeds(tf.data.Dataset.range(9).shard(3, 1).batch(2)))
        ['shard(3, 1)']
    """
    if isinstance(dataset, _Shard):
        yield f"shard({int(_number(dataset, '_num_shards'))}, {int(_number(dataset, '_index'))})"
    if isinstance(dataset, _Shuffle):
        yield f"shuffle with the seeds {int(_number(dataset, '_seed'))} and {int(_number(dataset, '_seed2'))}"
    for one in versions.private(dataset, "_inputs")():
        yield from shards_and_seeds(one)


def draws_random_numbers(dataset: tf.data.Dataset) -> bool:
    """Return whether a function of a dataset, such as one that augments images, draws random numbers.

    Python code in a `map` may draw; a generator of Python is one source of examples.

    Args:
        dataset: Any dataset.

    Example:
        >>> draws_random_numbers(tf.data.Dataset.range(9).map(lambda one: tf.random.uniform([])))
        True
    """
    for one in versions.private(dataset, "_functions")():
        operations = tf_graph.operation_types(one.function.graph)
        is_python = bool(operations & tf_graph.PYTHON) and not any("Generator" in one for one in operations)
        if is_python or any("Random" in operation or operation == "Multinomial" for operation in operations):
            return True
    return any(map(draws_random_numbers, versions.private(dataset, "_inputs")()))


def _number(dataset: tf.data.Dataset, name: str) -> tf.Tensor:
    return versions.private(dataset, name)

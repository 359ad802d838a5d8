"""Return to a position `(epoch, step)` in a dataset."""

import tensorflow as tf


def seek(dataset: tf.data.Dataset, epoch: int, step: int) -> tf.data.Dataset:
    """Move a new dataset to the position of an earlier run, and return the rest of that epoch.

    A seeded `tf.data` pipeline draws the order of an epoch when its iterator is created, so `seek` creates an iterator
    for each epoch to skip and does not read from it. The first `step` batches of the last epoch are read and discarded.

    Use the returned dataset once, for the epoch of the position. Later epochs come from `dataset` itself:

        rest = seek(dataset, epoch=3, step=7)
        for batch in rest: ...         # epoch 3 from batch 7 on
        for batch in dataset: ...      # epoch 4

    A shuffle without a seed, or random numbers of Python in a generator, cannot be reproduced: the batches then differ
    from those of the earlier run.

    Args:
        dataset: A dataset without any iterator yet, built exactly as in the earlier run.
        epoch: Completed epochs, at least 0.
        step: Batches already read in the current epoch, at least 0.

    Returns:
        The batches of epoch `epoch` from batch `step` on.

    Raises:
        ValueError: If the position is negative.

    >>> rest = seek(tf.data.Dataset.range(8).batch(2), epoch=1, step=3)
    >>> [batch.numpy().tolist() for batch in rest]
    [[6, 7]]
    """
    if epoch < 0 or step < 0:
        raise ValueError(f"A position counts from epoch 0 and step 0, but is epoch {epoch}, step {step}.")
    for _ in range(epoch):
        iter(dataset)
    return dataset.skip(step) if step else dataset

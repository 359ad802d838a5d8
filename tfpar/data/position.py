"""The position in a data set, `(epoch, step)`, and how to come back to it."""

import tensorflow as tf


def seek(dataset: tf.data.Dataset, epoch: int, step: int) -> tf.data.Dataset:
    """Moves a freshly built data set to where an earlier run stood, and returns the rest of that epoch.

    A seeded `tf.data` pipeline draws the order of an epoch when the iterator of that epoch is made, so making an
    iterator, and drawing nothing from it, is as good as an epoch. This makes `epoch` of them, then leaves out the first
    `step` batches. The left-out batches are computed and thrown away, in the time that reading them takes.

    The returned data set is for the epoch at the position, once. Later epochs come from `dataset` itself, which has
    moved along:

        rest = seek(dataset, epoch=3, step=7)
        for batch in rest: ...         # epoch 3 from batch 7 on
        for batch in dataset: ...      # epoch 4

    A shuffle without a seed cannot be replayed, and neither can Python's own randomness in a generator: then the
    batches after the position differ from those of the earlier run.

    Args:
        dataset: A data set of which no iterator was made yet, built exactly as in the earlier run.
        epoch: Epochs that were finished, from 0.
        step: Batches that were taken from the unfinished epoch, from 0.

    Returns:
        The batches of epoch `epoch` from batch `step` on.

    Raises:
        ValueError: A negative position.

    >>> rest = seek(tf.data.Dataset.range(8).batch(2), epoch=1, step=3)
    >>> [batch.numpy().tolist() for batch in rest]
    [[6, 7]]
    """
    if epoch < 0 or step < 0:
        raise ValueError(f"A position counts from epoch 0 and step 0, but is epoch {epoch}, step {step}.")
    for _ in range(epoch):
        iter(dataset)
    return dataset.skip(step) if step else dataset

"""A new input pipeline, moved to a position (epoch, step), continues exactly as the uninterrupted one."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import Build, assert_same, epoch

from tests.support.extent import sampled
from tfpar import config
from tfpar.data import class_weights, from_arrays, load, seek, split_batch


def add_noise(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return image + tf.cast(tf.random.stateless_uniform(image.shape, seed, 0, 9, tf.int32), image.dtype)


@pytest.fixture(params=["arrays", "digits", "digits cached", "digits augmented", "tfrecord", "generated", "weighted"])
def build(request: pytest.FixtureRequest) -> Build:
    """Return a function that builds the same input pipeline at each call, for every source."""
    if request.param == "arrays":
        return lambda: from_arrays(np.arange(23.0), np.arange(23), batch_size=4, shuffle=True, seed=3)
    if request.param == "weighted":
        arrays = lambda: from_arrays(np.arange(23.0), np.arange(23) % 2, batch_size=4, shuffle=True, seed=3)  # noqa: E731
        return lambda: class_weights(arrays(), {1: 2.0}).map(lambda *batch: split_batch(batch, 2))
    if request.param == "generated":
        settings, augment = config.Data(source="generated", num_examples=700), None
    elif request.param == "tfrecord":
        settings, augment = request.getfixturevalue("folder"), None
    else:
        changes = {
            "digits cached": {"cache": True},
            "digits augmented": {"augmentation": ("flip", "shift", "brightness")},
        }
        settings = request.getfixturevalue("digits").model_copy(
            update={"train_split": "train[:20%]", **changes.get(request.param, {})}
        )
        augment = add_noise if request.param == "digits augmented" else None
    return lambda: load(settings, global_batch_size=7, seed=5, augment=augment).train


@pytest.mark.few(1)
def test_a_fresh_pipeline_after_seek_equals_the_uninterrupted_one(build: Build) -> None:
    dataset = build()
    epochs = [epoch(dataset) for _ in range(4)]
    first_inputs = [np.concatenate([batch[0] for batch in batches]) for batches in epochs]
    assert not np.array_equal(first_inputs[0], first_inputs[1]), "epochs must differ in order"
    positions = [(0, 0), (0, 2), (1, 0), (2, 3), (2, len(epochs[2]))]
    for at_epoch, step in sampled(positions, of_ci=positions[2:4]):
        fresh = build()
        assert_same(epoch(seek(fresh, at_epoch, step)), epochs[at_epoch][step:], f"epoch {at_epoch} from step {step}")
        assert_same(epoch(fresh), epochs[at_epoch + 1], f"the epoch after {at_epoch}")


def test_an_epoch_left_in_the_middle_counts_as_one() -> None:
    build = lambda: from_arrays(np.arange(23.0), batch_size=4, shuffle=True, seed=3)  # noqa: E731
    whole, left = build(), build()
    expected = [epoch(whole) for _ in range(2)][1]
    next(iter(left))
    assert_same(epoch(left), expected, "after an epoch that was left after one batch")


@pytest.mark.parametrize(("at_epoch", "step"), [(-1, 0), (0, -1)])
def test_a_negative_position_is_refused(at_epoch: int, step: int) -> None:
    with pytest.raises(ValueError, match=f"epoch {at_epoch}, step {step}"):
        seek(tf.data.Dataset.range(3), at_epoch, step)

"""Normalisation and random changes of images."""

import numpy as np
import pytest
import tensorflow as tf

from tfpar.data.images import augment, measure, standard, unit

IMAGES = np.random.default_rng(0).integers(1, 256, [64, 12, 10, 3]).astype("uint8")


@pytest.mark.parametrize("dtype", [tf.uint8, tf.uint16])
def test_unit_divides_integers_by_their_largest_value(dtype: tf.DType) -> None:
    np.testing.assert_allclose(unit(tf.constant([0, 51, dtype.max], dtype)), [0, 51 / dtype.max, 1])


def test_unit_leaves_floats_alone() -> None:
    np.testing.assert_array_equal(unit(tf.constant([0.25, -3.0])), [0.25, -3.0])


def test_standard_gives_each_channel_mean_zero_and_deviation_one() -> None:
    statistics = measure(tf.data.Dataset.from_tensor_slices(IMAGES))
    np.testing.assert_allclose(statistics.mean, IMAGES.mean(axis=(0, 1, 2)), rtol=1e-6)
    normal = standard(tf.constant(IMAGES), statistics).numpy()
    np.testing.assert_allclose(normal.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(normal.std(axis=(0, 1, 2)), 1, rtol=1e-5)


def test_a_constant_channel_becomes_zero() -> None:
    statistics = measure(tf.data.Dataset.from_tensor_slices(np.full([4, 2], 7.0)))
    np.testing.assert_array_equal(standard(tf.fill([1, 2], 7.0), statistics), [[0, 0]])


@pytest.mark.parametrize("change", ["flip", "shift", "brightness"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_change_is_fixed_by_its_seed_and_differs_between_images(change: str, dtype: str) -> None:
    images = tf.constant(np.repeat(IMAGES[:1], 64, axis=0) / (1 if dtype == "uint8" else 255), dtype)
    changed = augment(images, tf.constant([1, 2], tf.int64), [change])
    assert (changed.dtype, changed.shape) == (images.dtype, images.shape)
    np.testing.assert_array_equal(changed, augment(images, tf.constant([1, 2], tf.int64), [change]))
    assert len({image.tobytes() for image in changed.numpy()}) > 1, "images of one batch are changed differently"
    assert not np.array_equal(changed, augment(images, tf.constant([1, 3], tf.int64), [change]))


def test_flip_mirrors_about_half_of_the_images() -> None:
    flipped = augment(tf.constant(IMAGES), tf.constant([0, 1], tf.int64), ["flip"]).numpy()
    mirrored = [np.array_equal(new, old[:, ::-1]) for new, old in zip(flipped, IMAGES, strict=True)]
    same = [np.array_equal(new, old) for new, old in zip(flipped, IMAGES, strict=True)]
    assert sum(mirrored) + sum(same) == 64
    assert 16 < sum(mirrored) < 48


def test_shift_moves_by_a_tenth_at_most_and_fills_with_zero() -> None:
    shifted = augment(tf.constant(IMAGES), tf.constant([0, 1], tf.int64), ["shift"]).numpy()
    seen = set()
    for new, old in zip(shifted, IMAGES, strict=True):
        padded = np.pad(old, [(1, 1), (1, 1), (0, 0)])
        windows = {(r, c): padded[r : r + 12, c : c + 10] for r in range(3) for c in range(3)}
        found = [offset for offset, window in windows.items() if np.array_equal(window, new)]
        assert found, "a shifted image is a window of the padded one"
        seen.update(found)
    assert len(seen) == 9, "every shift by up to one pixel occurs"


def test_brightness_stays_in_range() -> None:
    bright = augment(tf.constant(IMAGES), tf.constant([0, 1], tf.int64), ["brightness"]).numpy().astype(int)
    change = np.abs(bright - IMAGES)
    assert 10 < change.max() <= 52, "up to a fifth of 255"
    assert (bright.min(), bright.max()) == (0, 255), "clipped, not wrapped around"

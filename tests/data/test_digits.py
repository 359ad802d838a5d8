"""TFDS sources: the embedded digits, prepared once and quietly, and every failure in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import epoch
from sklearn.datasets import load_digits

from tfpar import config
from tfpar.data import load, user_message


def with_changes(settings: config.Data, **changes: Any) -> config.Data:
    return config.Data(**{**settings.model_dump(), **changes})


def test_digits_are_the_images_of_scikit_learn(digits: config.Data) -> None:
    loaded = load(with_changes(digits, shuffle_buffer=0), global_batch_size=64, seed=0)
    assert loaded[2:5] == (1497, 10, (8, 8, 1))
    batches = {"train": epoch(loaded.train), "test": epoch(loaded.validation)}
    original = load_digits()
    in_test = np.arange(1797) % 6 == 0
    for split, chosen in [("train", ~in_test), ("test", in_test)]:
        images = np.concatenate([x for x, _ in batches[split]])
        labels = np.concatenate([y for _, y in batches[split]])
        found = sorted((label, image.tobytes()) for image, label in zip((images * 255).round(), labels, strict=True))
        scaled = (original.images[chosen] * 255 / 16).round().astype("float32")
        wanted = sorted((label, image.tobytes()) for image, label in zip(scaled, original.target[chosen], strict=True))
        assert found == wanted, f"the {split} split holds its images and no others"
        assert np.bincount(labels).min() >= 25, "every digit is in both splits"


@pytest.mark.few(1)
@pytest.mark.parametrize("cache", [False, True])
def test_the_order_is_fixed_by_the_seed_and_differs_between_epochs(digits: config.Data, cache: bool) -> None:
    def labels(seed: int) -> list[Any]:
        train = load(with_changes(digits, cache=cache), global_batch_size=64, seed=seed).train
        return [np.concatenate([y for _, y in epoch(train)]).tolist() for _ in range(2)]

    first = labels(1)
    assert first == labels(1)
    assert first[0] != first[1]
    assert first != labels(2)


def test_validation_is_neither_shuffled_nor_augmented(digits: config.Data) -> None:
    plain = load(digits, global_batch_size=64, seed=0).validation
    augmented = load(with_changes(digits, augmentation=("flip", "shift")), global_batch_size=64, seed=1).validation
    for _ in range(2):
        for (x, y), (wanted_x, wanted_y) in zip(epoch(augmented), epoch(plain), strict=True):
            np.testing.assert_array_equal(x, wanted_x)
            np.testing.assert_array_equal(y, wanted_y)


def test_normalization_is_measured_on_the_training_split(digits: config.Data) -> None:
    loaded = load(with_changes(digits, normalization="standard"), global_batch_size=64, seed=0)
    train = np.concatenate([x for x, _ in epoch(loaded.train)])
    np.testing.assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-4)
    validation = np.concatenate([x for x, _ in epoch(loaded.validation)])
    assert 1e-3 < abs(validation.mean()) < 0.1, "the test split is close to it, but was not measured"


def test_none_leaves_the_images_as_stored(digits: config.Data) -> None:
    spec = load(with_changes(digits, normalization="none"), global_batch_size=64, seed=0).train.element_spec
    assert spec[0].dtype == tf.uint8


def test_the_hook_gets_each_image_before_normalisation(digits: config.Data) -> None:
    def paint(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        assert image.shape == [8, 8, 1]
        return tf.fill(image.shape, tf.cast(tf.random.stateless_uniform([], seed, 0, 256, tf.int32), tf.uint8))

    loaded = load(digits, global_batch_size=1497, seed=0, augment=paint)
    ((images, _),) = epoch(loaded.train)
    np.testing.assert_array_equal(images, images[:, :1, :1] * np.ones([1, 8, 8, 1]))
    assert len(np.unique(images)) > 200, "each image has a seed of its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "digitz"}, 'data.name "digitz" .* did you mean digits'),
        ({"name": "mnst"}, "did you mean mnist"),
        ({"name": "digits:9.9.9"}, "only: 1.0.0"),
        ({"name": "digits/small"}, "small not found"),
        ({"train_split": "trian"}, 'no split "trian". It has: train, test'),
        ({"validation_split": "valid"}, 'no split "valid"'),
        ({"train_split": "train[:0%]"}, "holds no examples"),
        ({"input_key": "picture"}, 'data.input_key is "picture", but "digits" has: image, label'),
        ({"label_key": "class"}, 'data.label_key is "class"'),
        ({"num_classes": 5}, "has 10 classes"),
    ],
)
def test_missing_files_and_splits_are_refused_in_one_sentence(
    digits: config.Data, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(with_changes(digits, **changes), global_batch_size=64, seed=0)
    assert "\n" not in str(caught.value)


def test_an_undownloadable_dataset_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **keywords: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(ConnectionError, match=r'"mnist" is not prepared in .*: run once with a network, or set data'):
        load(config.Data(name="mnist", directory=str(tmp_path)), global_batch_size=64, seed=0)


def test_an_unwritable_folder_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match=r"cannot be written to .* set data.directory"):
        load(config.Data(directory=str(tmp_path / "file")), global_batch_size=64, seed=0)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    settings = config.Data(directory=str(tmp_path))
    loaded = load(settings, global_batch_size=64, seed=0)
    victim = next(tmp_path.glob("digits/*/digits-train.tfrecord-00002*"))
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(tf.errors.DataLossError) as caught:
        epoch(loaded.train)
    assert f"{victim} is corrupt after" in str(user_message(caught.value, settings))

"""The image trainer: the models for a run's settings, and the parity of its networks on one device and on two."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar import config
from tfpar.checkpoint import Checkpoints, Position
from tfpar.trainers import recipe
from tfpar.trainers.image_classification import ImageClassification, build_model

pytestmark = pytest.mark.usefixtures("logical_cpus", "own_precision")

KERAS_OPTIMIZERS = [
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type)
    and issubclass(value, keras.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # those that hold other optimizers
]


@pytest.fixture
def own_precision() -> Any:
    """What a test does to Keras' precision ends with it."""
    yield
    recipe.set_precision("float32")


@pytest.fixture
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that read the digits from a folder of the tests."""
    return [f"data.directory={tmp_path_factory.getbasetemp() / 'tfds'}"]


def model(*overrides: str, image_shape: tuple[int, ...] = (8, 8, 1), num_classes: int = 10) -> keras.Model:
    run = config.load(None, overrides)
    recipe.set_precision(run.training.precision)
    return build_model(run, image_shape, num_classes)


def kernels(network: keras.Model) -> list[keras.Variable]:
    """All kernels, those of depthwise and separable convolutions too."""
    found = [weight for weight in network.trainable_variables if "kernel" in weight.name]
    assert found
    return found


def images(path: Path, num_images: int) -> Path:
    """A folder of PNG images of 32x32 in TFRecord files, of two classes."""
    for split in ("train", "test"):
        (path / split).mkdir(parents=True)
        with tf.io.TFRecordWriter(str(path / split / "0.tfrecord")) as writer:
            for i in range(num_images):
                pixels = np.random.default_rng(i).integers(0, 256, [32, 32, 3]).astype("uint8")
                encoded = tf.io.encode_png(pixels).numpy()
                features = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 2])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return path


# What is built


@pytest.mark.parametrize("image_shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)], ids=str)
def test_the_cnn_takes_digits_mnist_and_cifar10_and_gives_logits_of_the_classes(image_shape: tuple[int, ...]) -> None:
    cnn = model(image_shape=image_shape, num_classes=7)
    logits = cnn(np.random.default_rng(0).normal(size=[2, *image_shape]))
    assert logits.shape == (2, 7)
    assert float(tf.reduce_min(logits)) < 0, "logits, not probabilities"


@pytest.mark.extended
@pytest.mark.parametrize(("name", "num_kernels"), [("cnn", 4), ("MobileNetV2", 53)])
def test_l1_and_l2_reach_every_kernel_and_the_loss(name: str, num_kernels: int) -> None:
    network = model(f"model.name={name}", "model.l1=0.5", "model.l2=0.25", image_shape=(32, 32, 3))
    assert len(kernels(network)) == num_kernels
    arrays = [kernel.numpy() for kernel in kernels(network)]
    expected = sum(0.5 * np.abs(array).sum() + 0.25 * np.square(array).sum() for array in arrays)
    assert float(sum(network.losses)) == pytest.approx(expected, rel=1e-4)
    inputs, labels = np.zeros([2, 32, 32, 3]), np.array([0, 1])
    without = model(f"model.name={name}", image_shape=(32, 32, 3))
    assert without.losses == []
    assert network.evaluate(inputs, labels, verbose=0)[0] > expected > 0


def test_a_keras_network_normalizes_over_the_global_batch_in_every_layer() -> None:
    network = model("model.name=MobileNetV2", image_shape=(32, 32, 3), num_classes=2)
    normalizations = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(normalizations) == 52
    assert all(layer.synchronized for layer in normalizations)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["MobileNetV3Small", "EfficientNetB0"])
def test_a_keras_network_does_not_scale_images_that_the_data_have_scaled(name: str) -> None:
    """Some of them divide by 255 themselves; once more, and all images are nearly alike."""
    network = model(f"model.name={name}", image_shape=(32, 32, 3))
    scales = [layer.scale for layer in network.layers if isinstance(layer, keras.layers.Rescaling)]
    assert all(scale == 1 for scale in scales), scales


def test_dropout_comes_before_the_logits() -> None:
    network = model("model.dropout=0.5")
    assert isinstance(network.layers[-2], keras.layers.Dropout)
    assert network.layers[-2].rate == 0.5
    assert not any(isinstance(layer, keras.layers.Dropout) for layer in model().layers)


@pytest.mark.parametrize(("name", "shape"), [("cnn", (8, 8, 1)), ("MobileNet", (32, 32, 3))])
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_computes_in_half_and_ends_in_float32(
    name: str, shape: tuple[int, ...], precision: str
) -> None:
    network = model(f"training.precision={precision}", f"model.name={name}", image_shape=shape)
    assert network.output.dtype == "float32"
    convolutions = [layer for layer in network.layers if "conv" in layer.name.lower() and layer.weights]
    assert convolutions
    assert all(layer.compute_dtype == precision.removeprefix("mixed_") for layer in convolutions)
    assert {weight.dtype for weight in network.trainable_variables} == {"float32"}


def test_a_network_that_is_not_there_is_refused_with_one_that_is_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"received 'resnet50'. Did you mean ResNet50\? https://keras.io") as refused:
        model("model.name=resnet50")
    assert len(str(refused.value)) < 220
    with pytest.raises(ValueError, match=r"MobileNetV2.*\(8, 8, 1\).*at least 32x32.*Use larger images"):
        model("model.name=MobileNetV2")


# Optimizers


@pytest.mark.parametrize("name", KERAS_OPTIMIZERS)
def test_every_optimizer_of_keras_is_built_by_name_with_all_that_a_run_can_ask(name: str) -> None:
    overrides = ["training.global_clipnorm=2", "training.ema_momentum=0.9", "training.gradient_accumulation_steps=3"]
    for spelt in (name, name.lower()):
        run = config.load(None, [f"optimizer.name={spelt}", "optimizer.learning_rate=0.25", *overrides])
        optimizer = recipe.build_optimizer(run)
        assert type(optimizer) is getattr(keras.optimizers, name)
        assert float(optimizer.learning_rate) == 0.25
        assert (optimizer.global_clipnorm, optimizer.clipnorm, optimizer.clipvalue) == (2, None, None)
        assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.9)
        assert optimizer.gradient_accumulation_steps == 3


def test_an_optimizers_settings_reach_it_and_defaults_stay() -> None:
    run = config.load(
        None, ["optimizer.name=sgd", "optimizer.settings.momentum=0.9", "optimizer.settings.nesterov=true"]
    )
    optimizer = recipe.build_optimizer(run)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert (optimizer.use_ema, optimizer.gradient_accumulation_steps) == (False, None)


# Training


@pytest.mark.extended
@pytest.mark.parametrize("num_examples", [65, 1], ids=["a last batch of one", "fewer examples than replicas"])
def test_the_cnn_trains_alike_where_a_replica_gets_no_example(digits: list[str], num_examples: int) -> None:
    run = config.load(None, [*digits, f"data.train_split=train[:{num_examples}]", "optimizer.name=sgd"])
    weights = []
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(["CPU:0", "CPU:1"])):
        keras.utils.set_random_seed(1)  # what fixes the order of the examples is not tested here
        trainer = ImageClassification(run, strategy)
        trainer.fit(trainer.train_data, epochs=2, verbose=0)
        weights.append(trainer.model.get_weights())
    for actual, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_run_is_the_same_whatever_the_process_did_before(digits: list[str]) -> None:
    run = config.load(None, [*digits, "data.train_split=train[:130]", "model.dropout=0.2"])
    weights = []
    for seed_of_others in (5, 6):
        keras.utils.set_random_seed(seed_of_others)
        trainer = ImageClassification(run, tfpar.SingleDevice())
        trainer.fit(trainer.train_data, epochs=1, verbose=0)
        weights.append(trainer.model.get_weights())
    for actual, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_second_trainer_in_the_process_resumes_from_the_checkpoint_of_the_first(
    digits: list[str], tmp_path: Path
) -> None:
    run = config.load(None, [*digits, "data.train_split=train[:64]"])
    first, second = (ImageClassification(run, tfpar.SingleDevice()) for _ in range(2))
    for trainer in (first, second):
        trainer.model.optimizer.build(trainer.model.trainable_variables)
    first.fit(first.train_data, epochs=1, verbose=0)
    Checkpoints(tmp_path).save(first.model, Position(epoch=1), {})
    second.fit(second.train_data, epochs=1, verbose=0, checkpoints=Checkpoints(tmp_path))
    for actual, expected in zip(second.model.get_weights(), first.model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)

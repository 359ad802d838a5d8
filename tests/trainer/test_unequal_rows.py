"""Batches whose tensors have different numbers of rows: whole on one device, and refused where rows are divided."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tfpar.data import differing_rows, with_equal_rows

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_LABELLED = 6


def batches(labelled: int, others: int) -> tf.data.Dataset:
    """Labelled and other examples in one element."""
    features = parity_cases.inputs(NUM_LABELLED * 2)
    pairs = (features[:NUM_LABELLED], parity_cases.labels(NUM_LABELLED))
    zipped = tf.data.Dataset.zip(
        tf.data.Dataset.from_tensor_slices(pairs).batch(labelled),
        tf.data.Dataset.from_tensor_slices(features).batch(others),
    )
    return zipped.map(lambda pair, rest: ({"labelled": pair[0], "others": rest}, {"labelled": pair[1], "others": rest}))


def build() -> keras.Model:
    entries = {name: keras.Input((parity_cases.NUM_FEATURES,), name=name) for name in ("labelled", "others")}
    scores, width = keras.layers.Dense(3), keras.layers.Dense(parity_cases.NUM_FEATURES)
    model = keras.Model(entries, {"labelled": scores(entries["labelled"]), "others": width(entries["others"])})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"labelled": loss, "others": "mse"})
    return model


RULE = r"Every tensor of a batch must have a row for each example.*"
RECEIVED = r"Received 2, 4, 2, 4 rows in inputs\['labelled'\], inputs\['others'\], targets\['labelled'\]"


@small.each_splitting_strategy
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_it_is_refused_with_the_rows_of_each_tensor(strategy: str, method: str) -> None:
    trainer = tfpar.Trainer(build, small.SPLITTING_STRATEGIES[strategy](), seed=0)
    with pytest.raises(ValueError, match=RULE + RECEIVED):
        getattr(trainer, method)(batches(2, 4), verbose=0)


def test_a_later_batch_is_refused_too() -> None:
    equal, unequal = batches(3, 3).take(1), batches(2, 4)
    trainer = tfpar.Trainer(build, small.SPLITTING_STRATEGIES["mirrored"](), seed=0)
    with pytest.raises(ValueError, match=RULE + RECEIVED):
        trainer.fit(equal.concatenate(unequal), verbose=0)


def test_one_device_takes_it_as_keras_does() -> None:
    small.assert_trains_as_one_device(build, lambda: batches(2, 4), small.STRATEGIES["single_device"])


def test_shapes_that_differ_are_refused_without_a_batch() -> None:
    with pytest.raises(ValueError, match="Received 3, 2 rows in inputs, targets"):
        with_equal_rows((tf.zeros([3, 1]), tf.zeros([2])))


@pytest.mark.parametrize("kind", ["ragged", "sparse", "absent"])
def test_equal_rows_of_every_kind_stay_as_they_are(kind: str) -> None:
    made = {"ragged": [tf.ragged.constant([[1.0], []])], "sparse": [tf.sparse.from_dense([[0.0, 1.0], [0.0, 0.0]])]}
    leaves = made.get(kind, [])
    dataset = tf.data.Dataset.from_tensors((np.ones([2, 1], "float32"), *leaves))
    ((first, *others),) = dataset.map(lambda *batch: with_equal_rows(batch))
    assert first.shape == (2, 1)
    assert [type(one) for one in others] == [type(one) for one in leaves]


def test_another_error_has_no_such_sentence() -> None:
    assert differing_rows("OOM when allocating tensor") is None


@small.each_splitting_strategy
def test_a_tensor_of_unknown_rank_is_refused_by_its_name(strategy: str) -> None:
    def copied(inputs: dict[str, tf.Tensor], targets: dict[str, tf.Tensor]) -> tuple[object, object]:
        return inputs, targets | {"others": tf.numpy_function(np.copy, [targets["others"]], tf.float32)}

    trainer = tfpar.Trainer(build, small.SPLITTING_STRATEGIES[strategy](), seed=0)
    with pytest.raises(ValueError, match=r"axes, received targets\['others'\] of unknown shape.*ensure_shape"):
        trainer.fit(batches(2, 2).map(copied), verbose=0)

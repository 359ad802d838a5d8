"""Examples from a function: its valid results, and one sentence for every other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import stored
import tensorflow as tf
from conftest import epoch

import tfpar
from tfpar import config, data
from tfpar.data import load, user_message

ROWS = tf.data.Dataset.from_tensor_slices((np.ones([9, 2], "float32"), np.zeros(9, "int32")))
RETURNED = {
    "batches": ROWS.batch(3),
    "endless": ROWS.repeat(),
    "unordered": stored.examples().shuffle(40),
    "reshuffled": stored.examples().shuffle(40, seed=1),
    "inputs only": ROWS.map(lambda inputs, label: inputs),
    "dictionaries": ROWS.map(lambda inputs, label: ({"x": inputs}, label)),
    "arrays": (np.ones([9, 2]), np.zeros(9)),
    "three": (ROWS, ROWS, ROWS),
    "nothing": ROWS.take(0),
    "unlike": tf.data.Dataset.from_generator(
        lambda: iter([([1.0], 0)]), output_signature=(tf.TensorSpec([None]), tf.TensorSpec([], tf.int32))
    ),
}


def give(what: str) -> Any:
    return RETURNED[what]


def pair(num_train: int, num_validation: int = 4) -> Any:
    return stored.examples(num_train), stored.examples(num_validation)


def broken() -> tf.data.Dataset:
    def rows() -> Any:
        yield [1.0], 0
        raise KeyError("column_7")

    signature = (tf.TensorSpec([1]), tf.TensorSpec([], tf.int32))
    return tf.data.Dataset.from_generator(rows, output_signature=signature)


def settings(function: str, **changes: Any) -> config.Data:
    return config.Data(source="python", **{"function": function, "num_classes": 3, "normalization": "none", **changes})


def test_a_function_gets_its_arguments_and_returns_training_and_validation_data() -> None:
    own = settings("test_python_function.pair", arguments={"num_train": 10})
    loaded = load(own, global_batch_size=4, seed=0)
    assert loaded.num_train_examples == 10
    assert len(np.concatenate([batch[1] for batch in epoch(loaded.validation)])) == 4
    without = load(own.model_copy(update={"validation_split": None}), global_batch_size=4, seed=0)
    assert without.validation is None
    with pytest.raises(
        ValueError, match=r"validation_share = 0\.2 holds out training examples, but .* returns validation data"
    ):
        load(own.model_copy(update={"validation_share": 0.2}), global_batch_size=4, seed=0)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("no_such_module.load", {}, r'must be the import path of .*received "no_such_module\.load": No module named'),
        ("test_python_function.load_it", {}, r"has no attribute 'load_it'"),
        ("test_python_function.ROWS", {}, r'received "test_python_function\.ROWS"'),
        (
            "test_python_function.pair",
            {"num": 1},
            r"data\.arguments must be those of .*pair\(num_train: int, num_valid",
        ),
        (
            "test_python_function.give",
            {"what": "batches"},
            r"\(None, 2\) and \(None,\), as batches have: leave out batch",
        ),
        ("test_python_function.give", {"what": "endless"}, r"must return finite datasets, .* leave out repeat\(\)"),
        ("test_python_function.give", {"what": "unordered"}, r"two passes over those of .* begin differently"),
        ("test_python_function.give", {"what": "reshuffled"}, r"two passes over those of .* begin differently"),
        ("test_python_function.give", {"what": "inputs only"}, r"of \(input, label\) examples, .* but the elements of"),
        ("test_python_function.give", {"what": "dictionaries"}, r"each one tensor, but the elements of"),
        (
            "test_python_function.give",
            {"what": "arrays"},
            r"or two: \(train, validation\), but .* returned ndarray, ndarray",
        ),
        (
            "test_python_function.give",
            {"what": "three"},
            r"or two: \(train, validation\), but .* returned _\w+Dataset, ",
        ),
        (
            "test_python_function.give",
            {"what": "nothing"},
            "The dataset of test_python_function.give holds no examples",
        ),
        ("test_python_function.give", {"what": "unlike"}, r"inputs must have one fixed shape .* have \(None,\)"),
    ],
)
def test_other_objects_than_functions_are_refused_in_one_sentence(
    function: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(settings(function, arguments=arguments), global_batch_size=4, seed=0)
    assert "\n" not in str(caught.value)


def test_an_error_of_a_generator_is_reported_without_tensorflows_traceback(tmp_path: Path) -> None:
    own = settings("test_python_function.broken", shuffle_buffer=0)
    with pytest.raises((ValueError, tf.errors.OpError)) as caught:
        epoch(load(own, global_batch_size=4, seed=0).train)
    sentence = str(caught.value) if isinstance(caught.value, ValueError) else user_message(caught.value, own)
    assert sentence == "KeyError: 'column_7'"


def test_an_error_of_a_generator_inside_of_a_step_is_reported_without_tensorflows_traceback() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(tf.errors.OpError) as caught:
        tfpar.Trainer(build).fit(broken().batch(1), verbose=0)
    assert user_message(caught.value, settings("test_python_function.broken")) == "KeyError: 'column_7'"


# TensorFlow's errors about data in one sentence


def raising(error: Exception) -> Callable[[tf.Tensor], tf.Tensor]:
    def function(rows: tf.Tensor) -> tf.Tensor:
        raise error

    return function


@pytest.mark.parametrize("wrapper", [tf.py_function, tf.numpy_function])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("my own error"), "KeyError: 'my own error'"),
        (ValueError("row 3 is bad"), "row 3 is bad"),
        (RuntimeError(), "RuntimeError"),
        (StopIteration("too early"), "StopIteration: too early"),
    ],
    ids=repr,
)
def test_an_error_in_a_function_of_batches_is_its_own_sentence(
    wrapper: Callable[..., tf.Tensor], error: Exception, sentence: str
) -> None:
    function = raising(error)
    dataset = tf.data.Dataset.range(4).batch(2).map(lambda rows: wrapper(function, [rows], tf.int64))
    with pytest.raises(tf.errors.OpError) as raised:
        next(iter(dataset))
    assert data.user_message(raised.value, config.Data()) == sentence
    assert data.cause_of(raised.value) == sentence


def test_a_cache_that_two_processes_write_names_the_way_out(tmp_path: Path) -> None:
    dataset = tf.data.Dataset.range(4).cache(str(tmp_path / "cache"))
    first = iter(dataset)
    next(first)
    with pytest.raises(tf.errors.AlreadyExistsError) as raised:
        next(iter(dataset))
    sentence = data.cause_of(raised.value)
    assert sentence.startswith(f"Another process writes the cache '{tmp_path}/cache")
    assert "Give each worker a file of its own, such as dataset.cache(f'cache-{strategy.rank}')" in sentence

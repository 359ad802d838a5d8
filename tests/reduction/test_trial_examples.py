"""Made-up examples: dense outputs of any type and size, and targets with other zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar.reduction.trial_examples import NUM_EXAMPLES, SIZES, made_up

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_examples_differ_in_outputs_and_have_parts() -> None:
    batch = {"x": tf.zeros([3, 2])}, (tf.ones([3, 5, 1], "bfloat16"), tf.constant([True, False, True]), None)
    outputs = {"a": tf.zeros([2, 4], "float16"), "b": tf.zeros([2, 3, 3]), "number": tf.zeros([2], "int32")}
    for examples in made_up(batch, outputs):
        assert [leaf.dtype for leaf in tf.nest.flatten(examples.outputs)] == [tf.float16, tf.float32, tf.int32]
        rows = examples.outputs["b"].numpy()
        assert len({row.tobytes() for row in rows}) == NUM_EXAMPLES
        parts = examples.parts()
        assert [len(part.targets[0]) for part in parts] == list(SIZES)
        np.testing.assert_array_equal(np.concatenate([part.outputs["b"] for part in parts]), rows)


def test_targets_end_at_different_positions_and_flags_change() -> None:
    batch = tf.zeros([8, 2]), {"tokens": tf.ones([8, 4], "int32"), "flags": tf.constant([True] * 8)}
    same, _, ended, binary, *_ = made_up(batch, tf.zeros([8, 1]))
    assert ended.targets["tokens"].numpy().sum(1).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert ended.targets["flags"].numpy().tolist() == [True, False] * 4
    assert same.targets["flags"].numpy().all()
    assert 0 < binary.targets["flags"].numpy().sum() < 8


def ragged() -> tf.RaggedTensor:
    return tf.ragged.constant([[1.0], [1.0, 2.0]])


def very_large() -> tf.Tensor:
    return tf.zeros([1, 1 << 20, 65])


@pytest.mark.parametrize("outputs", [ragged, very_large])
def test_ragged_and_very_large_outputs_have_none(outputs: Callable[[], Any]) -> None:
    assert not list(made_up((tf.zeros([2, 2]), tf.zeros([2, 1])), outputs()))

"""Made-up rows: dense outputs of any type and size, and targets with other zeros."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfpar.study.synthetic_rows import FEW, MANY, synthetic_rows

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_examples_differ_in_outputs_and_have_parts() -> None:
    batch = {"x": tf.zeros([3, 2])}, (tf.ones([3, 5, 1], "bfloat16"), tf.constant([True, False, True]), None)
    outputs = {"a": tf.zeros([2, 4], "float16"), "b": tf.zeros([2, 3, 3]), "number": tf.zeros([2], "int32")}
    for examples in synthetic_rows(batch, outputs):
        assert [leaf.dtype for leaf in tf.nest.flatten(examples.outputs)] == [tf.float16, tf.float32, tf.int32]
        rows = examples.outputs["b"].numpy()
        assert len({row.tobytes() for row in rows}) == sum(MANY)
        parts = examples.parts()
        assert [len(part.targets[0]) for part in parts] == list(MANY)
        np.testing.assert_array_equal(np.concatenate([part.outputs["b"] for part in parts]), rows)


def test_targets_end_at_different_positions_and_flags_change() -> None:
    batch = tf.zeros([8, 2]), {"tokens": tf.ones([8, 5], "int32"), "flags": tf.constant([True] * 8)}
    same, _, ended, binary, *_ = synthetic_rows(batch, tf.zeros([8, 1]))
    assert ended.targets["tokens"].numpy().sum(1).tolist() == [1, 2, 3, 4] * 4
    assert ended.targets["flags"].numpy().tolist() == [True, False] * 8
    assert same.targets["flags"].numpy().all()
    assert 0 < binary.targets["flags"].numpy().sum() < 16


def test_ragged_outputs_have_none() -> None:
    assert not list(synthetic_rows((tf.zeros([2, 2]), tf.zeros([2, 1])), tf.ragged.constant([[1.0], [1.0, 2.0]])))


def test_of_large_outputs_there_are_few_rows() -> None:
    first = next(synthetic_rows((tf.zeros([2, 2]), tf.zeros([2, 1])), tf.zeros([1, 1 << 21])))
    assert first.sizes == FEW

"""The data of a plan: all kinds that `fit` takes, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfpar
from tests.support import input_cases as cases
from tests.support import small
from tests.support.input_cases import BATCH_SIZE, FEATURES, LABELS, Rows
from tfpar.planning import first_batches

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus", "short_laps")]


def arguments_of(name: str) -> tuple[Any, ...]:
    if name in cases.NEED_TORCH and not cases.HAS_TORCH:
        pytest.skip("torch is not installed")
    arguments = cases.CASES[name].arguments()
    return tuple(arguments[key] for key in ("x", "y", "sample_weight") if key in arguments)


def shards() -> tfpar.data.Sharded:
    examples = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    return tfpar.data.Sharded(lambda shard: examples.shard(2, shard), 2, BATCH_SIZE)


@pytest.mark.parametrize(
    "make",
    [
        small.data,
        shards,
        lambda: arguments_of("endless PyDataset, two threads")[0],
        lambda: arguments_of("DataLoader")[0],
        lambda: arguments_of("generator with weights")[0],
        lambda: arguments_of("ragged generator")[0],
    ],
)
def test_the_first_batch_of_all_data_is_read_with_the_shapes_of_all_batches(make: Callable[[], Any]) -> None:
    given = first_batches.read(make())
    [batch] = given.first
    assert int(tfpar.data.num_rows(batch)) == BATCH_SIZE
    assert all(leaf.shape[0] is None for leaf in tf.nest.flatten(given.first.element_spec))
    assert given.wait_seconds > 0


def test_a_plan_reads_the_first_batches_once_and_calls_no_hook() -> None:
    rows = Rows()
    plan = tfpar.plan(small.build_model, rows, devices=["CPU:0", "CPU:1"], budget_seconds=0.1)
    assert len(plan.rows) > 1
    assert rows.calls == [0, 1, 0, 1, 2, 3, 4]  # two for the shapes, as in fit


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["sparse, own layer", "ragged, own layer", "None in a generator"])
def test_a_plan_takes_what_fit_takes(name: str) -> None:
    plan = tfpar.plan(cases.CASES[name].model, arguments_of(name), batch_size=BATCH_SIZE, devices=["CPU:0"])
    assert plan.facts.batch == BATCH_SIZE
    assert plan.facts.num_blocks > 0
    assert plan.best is not None


def fails_later() -> Iterator[Any]:
    yield from [(FEATURES[:8], LABELS[:8])] * 2
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: small.data().take(0), ValueError, "A dataset must yield at least one batch, but this one is empty"),
        (lambda: cases.generate(times=0), ValueError, "must yield at least one batch"),
        (lambda: (FEATURES[:0], LABELS[:0]), ValueError, "hold no examples"),
        (lambda: cases.dataset(FEATURES, LABELS).map(lambda *batch: tfpar.data.take_rows(batch, 0, 0)), ValueError,
         "the first batch, which must hold at least one example, but it is empty"),
        (lambda: small.data().unbatch(), ValueError, "must be a batch"),
        (lambda: FEATURES, ValueError, "needs targets, and the data yields inputs alone"),
        (lambda: (), ValueError, r"A tuple of arrays must be \(inputs,\), .*received a tuple of 0"),
        (lambda: (Rows(), LABELS), ValueError, "`y` should not be passed"),
        (lambda: cases.generate, TypeError, r"Call it: generate\(\) is a generator of batches"),
        (fails_later, ValueError, "OSError: the disk is gone"),
    ],
)  # fmt: skip
def test_other_data_are_refused_in_one_sentence(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        tfpar.plan(small.build_model, make(), devices=["CPU:0"])
    assert "\n" not in str(caught.value)

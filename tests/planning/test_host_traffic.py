"""What the links between hosts add to a step of replicas, from costs that the test states; no TensorFlow."""

from __future__ import annotations

import dataclasses

import pytest

from tfpar.pipeline.schedule.links import Link
from tfpar.planning.costs import BlockCost, Curve, Factored, Line, MachineCosts, ModelCosts
from tfpar.planning.host_traffic import PACK_BYTES
from tfpar.planning.layouts import Layout
from tfpar.planning.step_prediction import predict

FREE = Link(0.0, 1e30)
# Per example 1 s forward and 2 s backward in each block, 4 examples on each of two replicas: 16 s and 32 s.
BLOCKS = tuple(BlockCost(f"dense_{number}", Line(0, 1.0), Line(0, 2.0), PACK_BYTES, PACK_BYTES) for number in range(4))
MODEL = ModelCosts(
    "four blocks", 40, 4 * PACK_BYTES, 4 * PACK_BYTES, 0, (PACK_BYTES,) * 4, batch=8,
    compute=Curve((4, 8), (48.0, 96.0)), update_seconds=8.0, blocks=BLOCKS,
)  # fmt: skip
MACHINE = MachineCosts("CPU", 2, 2, num_hosts=2, add=FREE, num_cores=2)
TWO = Layout(2, num_hosts=2)


def seconds(pack_seconds: float, model: ModelCosts = MODEL, layout: Layout = TWO, speed: float = 1.0) -> float:
    """Return the step where a message of one block takes some seconds."""
    machine = dataclasses.replace(MACHINE, network=Link(0.0, PACK_BYTES / pack_seconds), speed=speed)
    return predict(layout, model, machine).seconds


def test_an_all_reduce_hides_behind_the_backward_pass_of_the_blocks_below() -> None:
    assert seconds(1.0) == 48 + 1 + 8, "that of the first block alone is exposed"
    assert seconds(8.0) == 48 + 8 + 8, "each message takes as long as the backward pass of a block"


def test_a_slow_link_is_busy_from_the_last_gradients_on() -> None:
    assert seconds(20.0) == 16 + 8 + 4 * 20 + 8


def test_small_gradients_share_a_message_that_waits_for_the_last_of_them() -> None:
    small = tuple(dataclasses.replace(block, trainable_bytes=PACK_BYTES // 4) for block in BLOCKS)
    packed = dataclasses.replace(MODEL, blocks=small, trainable_bytes=PACK_BYTES, variable_bytes=(PACK_BYTES // 4,) * 4)
    assert seconds(8.0, packed) == 48 + 8 + 8


def test_a_model_that_cannot_be_cut_sends_after_the_backward_pass() -> None:
    assert seconds(1.0, dataclasses.replace(MODEL, blocks=())) == 48 + 4 + 8


def test_faster_devices_leave_less_to_hide_behind() -> None:
    assert seconds(8.0, speed=2.0) == (16 + 8) / 2 + 4 * 8 + 8 / 2


def test_rows_of_factors_are_sent_in_place_of_the_gradients_and_multiplied_by_all() -> None:
    found = Factored(PACK_BYTES, PACK_BYTES // 8, product_seconds=2.0)
    by_rows = dataclasses.replace(MODEL, blocks=tuple(dataclasses.replace(one, factored=found) for one in BLOCKS))
    half_of_rows, others_part = 1 / 8 / 2, 4 * 2 / 2
    assert seconds(1.0, by_rows) == 48 + others_part + half_of_rows + 8
    one_host = dataclasses.replace(MACHINE, num_hosts=1, reduce={2: FREE})
    assert predict(Layout(2), by_rows, one_host).seconds == predict(Layout(2), MODEL, one_host).seconds


def test_new_weights_are_sent_after_the_update() -> None:
    sharded = dataclasses.replace(TWO, shard="optimizer")
    assert seconds(1.0, layout=sharded) == 48 + 1 + 4 * 0.5 + 8 / 2


def test_all_send_as_much_as_the_owner_of_the_largest_weight() -> None:
    sharded = dataclasses.replace(TWO, shard="optimizer")
    uneven = dataclasses.replace(MODEL, variable_bytes=(3 * PACK_BYTES, PACK_BYTES))
    longer_update = 8 * (3 / 4 - 1 / 2)
    assert seconds(1.0, uneven, sharded) - seconds(1.0, layout=sharded) == pytest.approx(3 - 2 + longer_update)


def test_messages_are_as_large_as_those_of_workers() -> None:
    from tfpar.strategies.multi_worker import collectives

    assert PACK_BYTES == collectives.PACK_BYTES

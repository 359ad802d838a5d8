"""The peak memory of layouts, from costs that are easy to add up. Pure Python."""

from __future__ import annotations

import dataclasses

import pytest

from tfpar.planning.costs import BlockCost, Bytes, Curve, Line, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout
from tfpar.planning.memory import bytes_of_devices, device_bytes, largest_batch

BLOCKS = tuple(
    BlockCost(
        name=name,
        forward=Line(0.0, 1.0),
        backward=Line(0.0, 2.0),
        weight_bytes=100,
        trainable_bytes=100,
        output=Bytes(0, 4),
        cut=Bytes(0, 4),
        saved=Bytes(0, 4),
        temporary=Bytes(0, 8),
        divided_bytes=100,
        is_divided=True,
        shared=Bytes(0, 4),
    )
    for name in "abcd"
)
# Four weights of 100 bytes with two slots each; a step needs their gradients, and 20 bytes of each example.
MODEL = ModelCosts(
    "mlp", 100, 400, 400, 800, (100,) * 4, 8, Curve((8,), (1.0,)), 0.0, working=Bytes(400, 20), blocks=BLOCKS
)
MACHINE = MachineCosts("GPU", num_devices=2, num_measured=2, runtime_bytes=7)
LAYOUTS = [
    Layout(),
    Layout(2),
    Layout(2, shard="optimizer"),
    Layout(2, shard="weights"),
    Layout(num_stages=2, num_microbatches=4),
    Layout(num_stages=2, num_microbatches=4, recompute=True),
    Layout(num_stages=2, num_microbatches=4, schedule="zero_bubble"),
    Layout(2, num_stages=2, num_microbatches=2),
    Layout(num_shards=2),
    Layout(2, num_hosts=2),
]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), 400 + 800 + 400 + 8 * 20),
        # Half of the examples, and the sum of a gradient over the replicas.
        (Layout(2), 400 + 800 + 400 + 4 * 20 + 100),
        (Layout(2, shard="optimizer"), 400 + 400 + 400 + 4 * 20 + 100),
        # Half of weights, gradients and slots; weights of two blocks, a gradient; saved and temporary tensors.
        (Layout(2, shard="weights"), 200 + 200 + 400 + 2 * 100 + 100 + 4 * (4 + 4 * 4 + 8)),
        # Two blocks with their gradients and slots; two micro-batches of 2 examples in flight; temporaries with the
        # gradients of one micro-batch.
        (Layout(num_stages=2, num_microbatches=4), 200 + 200 + 400 + 2 * 2 * 12 + 2 * 8 + 200),
        # Half of the state, and of the saved tensors but for the inputs, a fifth of them.
        (Layout(num_shards=2), (400 + 800 + 400) // 2 + 8 * 20 * 0.2 + 8 * 20 * 0.8 / 2),
    ],
    ids=str,
)
def test_the_peak_is_the_sum_of_what_a_device_holds(layout: Layout, expected: int) -> None:
    assert device_bytes(layout, MODEL, MACHINE, 8) == 7 + expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_larger_batch_needs_no_less(layout: Layout) -> None:
    found = [device_bytes(layout, MODEL, MACHINE, batch) for batch in range(4, 64)]
    assert found == sorted(found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_largest_batch_fits_and_the_next_does_not(layout: Layout) -> None:
    machine = dataclasses.replace(MACHINE, memory_bytes=5000)
    largest = largest_batch(layout, MODEL, machine)
    assert largest
    assert device_bytes(layout, MODEL, machine, largest) <= 5000 < device_bytes(layout, MODEL, machine, largest + 1)


def test_without_a_limit_there_is_no_largest_batch_and_with_too_little_memory_it_is_0() -> None:
    assert largest_batch(Layout(), MODEL, MACHINE) is None
    assert largest_batch(Layout(), MODEL, dataclasses.replace(MACHINE, memory_bytes=100)) == 0


def test_the_next_batch_is_on_the_device_too() -> None:
    model = dataclasses.replace(MODEL, input_bytes=10)
    assert device_bytes(Layout(), model, MACHINE, 8) - device_bytes(Layout(), MODEL, MACHINE, 8) == 2 * 8 * 10


@pytest.mark.parametrize(
    ("layout", "num_batches"), [(Layout(), 1), (Layout(num_shards=2), 1), (Layout(2), 2), (Layout(1, 2, 4), 2)]
)
def test_on_a_cpu_the_batch_of_the_host_and_its_parts_count_too(layout: Layout, num_batches: int) -> None:
    model, cpu = (
        dataclasses.replace(MODEL, input_bytes=10, variable_bytes=(), working=Bytes(1000, 20)),
        dataclasses.replace(MACHINE, device="CPU"),
    )
    assert device_bytes(layout, model, cpu, 8) - device_bytes(layout, model, MACHINE, 8) == num_batches * 8 * 10


def test_devices_differ_by_the_weights_that_they_own_and_by_the_layers_that_stay_whole() -> None:
    model = dataclasses.replace(MODEL, variable_bytes=(300, 100))
    used = 400 + 400 + 4 * 20
    # Each receives the gradients of the other for its largest weight.
    assert bytes_of_devices(Layout(2, shard="optimizer"), model, 8) == [used + 600 + 300, used + 200 + 100]
    first, *others = BLOCKS
    model = dataclasses.replace(
        MODEL, blocks=(dataclasses.replace(first, is_divided=False, divided_bytes=0, shared=Bytes()), *others)
    )
    part = (1600 + 8 * 20) * 3 // 4 // 2
    assert bytes_of_devices(Layout(num_shards=2), model, 8) == [part + (1600 + 8 * 20) // 4, part]


def test_logical_cpus_hold_equal_copies_once() -> None:
    """Two replicas have one memory for what is sent between them, and for weights that one of them updates."""

    def saved_by_sharing(layout: Layout) -> int:
        with_copies, shared = (sum(bytes_of_devices(layout, model, 8, shares_memory=one)) for one in (False, True))
        return with_copies - shared

    model = dataclasses.replace(MODEL, input_bytes=10, working=Bytes(1000, 20))
    assert saved_by_sharing(Layout()) == 0
    assert saved_by_sharing(Layout(2)) == 2 * 100, "the sums of a gradient"
    assert saved_by_sharing(Layout(2, shard="optimizer")) == 2 * 100 + 400, "and the weights"
    assert saved_by_sharing(Layout(2, shard="weights")) == 2 * (100 + 2 * 100), "and those of two blocks"
    assert saved_by_sharing(Layout(num_shards=2)) == 8 * 10, "the batch of the other shard"
    assert saved_by_sharing(Layout(num_stages=2, num_microbatches=4)) == 0
    assert saved_by_sharing(Layout(2, num_stages=2, num_microbatches=4)) == 4 * 100 + 400, "sums and weights"
    assert saved_by_sharing(Layout(2, num_shards=2)) == 400 + 2 * 4 * 10, "weights, and the batch of each other shard"
    assert saved_by_sharing(Layout(2, shard="optimizer", num_hosts=2)) == 0, "two hosts share nothing"


def slots_of(layout: Layout, model: ModelCosts = MODEL, batch: int = 8) -> list[int]:
    """Return the bytes of the optimizer's state on each device."""
    both = (bytes_of_devices(layout, one, batch) for one in (model, dataclasses.replace(model, slot_bytes=0)))
    return [held - without for held, without in zip(*both, strict=True)]


def test_the_replicas_of_a_pipeline_divide_its_state_in_one_process() -> None:
    model = dataclasses.replace(MODEL, blocks=tuple(dataclasses.replace(one, saved=Bytes(0, 400)) for one in BLOCKS))
    # The forward and backward passes need more than the update, so that the peak has no temporaries of slots.
    assert slots_of(Layout(2, 2, 2), model, 16)[0] == 800 / 2 / 2
    assert slots_of(Layout(1, 2, 2), model, 8)[0] == 800 / 2
    uneven = tuple(dataclasses.replace(one, variable_bytes=(90, 10)) for one in model.blocks)
    assert slots_of(Layout(4, 2, 2), dataclasses.replace(model, blocks=uneven), 32)[0] == 400 * 90 / 200, "not a fourth"


def test_stages_before_a_cut_between_hosts_save_one_micro_batch_more() -> None:
    one_host = bytes_of_devices(Layout(1, 4, 8), MODEL, 64)
    across = bytes_of_devices(Layout(1, 4, 8, num_hosts=2, across_hosts=True), MODEL, 64)
    assert [more - one for more, one in zip(across, one_host, strict=True)] == [8 * 8, 8 * 8, 0, 0]


def test_the_first_replica_of_shards_holds_their_state_unless_it_is_divided() -> None:
    assert slots_of(Layout(2, num_shards=2)) == [400, 400, 0, 0]
    assert slots_of(Layout(2, num_shards=2, shard="optimizer")) == [200] * 4
    assert slots_of(Layout(2, num_shards=2, num_hosts=2)) == [400] * 4, "each host has all of it"
    assert slots_of(Layout(4, num_shards=2, num_hosts=2)) == [200] * 8, "its replicas divide it"
    whole = dataclasses.replace(MODEL, blocks=(dataclasses.replace(BLOCKS[0], divided_bytes=0), *BLOCKS[1:]))
    divided = 800 * 3 // 4 // 2
    assert slots_of(Layout(2, num_shards=2, shard="optimizer"), whole) == [divided // 2 + 200, *[divided // 2] * 3]
    on_hosts = Layout(2, num_shards=2, num_hosts=2, shard="optimizer")
    assert slots_of(on_hosts, whole) == [divided // 2 + 100, divided // 2] * 2, "their replicas divide all weights"


def test_replicas_hold_all_gradients_until_they_are_summed() -> None:
    model = dataclasses.replace(
        MODEL, working=Bytes(200, 20)
    )  # one device updates each weight before the next gradient
    assert bytes_of_devices(Layout(2), model, 8) == [400 + 800 + 400 + 100] * 2
    of_cpus = bytes_of_devices(Layout(2), model, 8, shares_memory=True)
    assert of_cpus == [400 + 800 + 400 + 400 // 2] * 2, "the sums are in one memory"


@pytest.mark.parametrize("layout", LAYOUTS[3:8], ids=str)
def test_memory_inside_of_operations_is_added_for_the_examples_that_a_device_computes_at_once(layout: Layout) -> None:
    found = bytes_of_devices(layout, dataclasses.replace(MODEL, scratch=Bytes(0, 10)), 8)
    examples = 8 // layout.num_replicas // layout.num_microbatches
    assert [more - one for more, one in zip(found, bytes_of_devices(layout, MODEL, 8), strict=True)] == [
        10 * examples
    ] * len(found)


def test_recomputation_saves_less() -> None:
    blocks = tuple(dataclasses.replace(block, saved=Bytes(0, 400)) for block in BLOCKS)
    model = dataclasses.replace(MODEL, blocks=blocks)
    saving, recomputing = (Layout(num_stages=2, num_microbatches=4, recompute=one) for one in (False, True))
    assert device_bytes(recomputing, model, MACHINE, 8) < device_bytes(saving, model, MACHINE, 8)


@pytest.mark.parametrize(
    ("layout", "batches"),
    [
        (Layout(), [2 * 8]),
        (Layout(2), [3 * 4] * 2),
        (Layout(2, shard="weights"), [2 * 4] * 2),
        (Layout(num_shards=2), [2 * 8, 8]),
        (Layout(2, num_shards=2), [2 * 4, 4] * 2),
    ],
    ids=str,
)
def test_each_device_holds_batches_ahead(layout: Layout, batches: list[int]) -> None:
    """The replicas of tf.distribute hold one more, and other shards than the first that of the step alone."""
    with_inputs = bytes_of_devices(layout, dataclasses.replace(MODEL, input_bytes=10), 8)
    found = [one - other for one, other in zip(with_inputs, bytes_of_devices(layout, MODEL, 8), strict=True)]
    assert found == [10 * number for number in batches]


def test_each_stage_has_its_own_bytes_and_the_fullest_counts() -> None:
    layout = Layout(num_stages=2, num_microbatches=4)
    first, last = bytes_of_devices(layout, MODEL, 8)
    assert first > last  # two micro-batches in flight, and one
    assert device_bytes(layout, MODEL, MACHINE, 8) == first + MACHINE.runtime_bytes


def test_a_weight_gradient_pass_holds_the_old_and_the_new_sums() -> None:
    blocks = tuple(dataclasses.replace(block, saved=Bytes(), temporary=Bytes(), shared=Bytes()) for block in BLOCKS)
    model = dataclasses.replace(MODEL, blocks=tuple(dataclasses.replace(block, output=Bytes()) for block in blocks))
    layout = Layout(num_stages=2, num_microbatches=4, schedule="zero_bubble")
    assert bytes_of_devices(layout, model, 8) == [200 + 200 + 400 + 200] * 2


def test_the_update_of_a_stage_with_one_large_weight_is_its_peak() -> None:
    first, *others = (dataclasses.replace(one, saved=Bytes(), temporary=Bytes(), shared=Bytes()) for one in BLOCKS)
    model = dataclasses.replace(
        MODEL, trainable_bytes=10_300, slot_bytes=20_600,
        blocks=(dataclasses.replace(first, weight_bytes=10_000, trainable_bytes=10_000), *others),
    )  # fmt: skip
    layout = Layout(num_stages=2, num_microbatches=4, schedule="zero_bubble")
    weights = gradients = 10_100
    assert bytes_of_devices(layout, model, 8)[0] == weights + gradients + 2 * weights + 2 * 10_000


def test_the_first_stage_gets_the_inputs_and_the_last_one_the_targets() -> None:
    layout, model = Layout(num_stages=2, num_microbatches=4), dataclasses.replace(MODEL, input_bytes=10, target_bytes=1)
    without, received = bytes_of_devices(layout, MODEL, 8), bytes_of_devices(layout, model, 8)
    assert [more - one for one, more in zip(without, received, strict=True)] == [2 * 8 * 9, 2 * 8 * 1]

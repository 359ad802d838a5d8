"""The predicted step of each layout, from costs that the test states; no TensorFlow."""

from __future__ import annotations

import dataclasses

import pytest

from tfpar.pipeline.schedule import make
from tfpar.pipeline.schedule.links import Link
from tfpar.pipeline.schedule.simulator import Durations, simulate
from tfpar.planning.costs import BlockCost, Bytes, Curve, Line, MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, Refusal, Shard, candidates, never_tried
from tfpar.planning.stage_costs import stages_of
from tfpar.planning.stated import Stated
from tfpar.planning.step_prediction import predict

NO_COST = Link(0.0, 1e30)
BLOCKS = tuple(
    BlockCost(f"dense_{number}", Line(0, 1.0), Line(0, 2.0), 40, 40, divided_bytes=40, is_divided=True)
    for number in range(4)
)
MODEL = ModelCosts(
    "four blocks", 40, 160, 160, 320, (40,) * 4, batch=8, compute=Curve((4, 8), (48.0, 96.0)), update_seconds=8.0,
    blocks=BLOCKS,
)  # fmt: skip
MACHINE = MachineCosts("CPU", 4, 4, copy=NO_COST, add=NO_COST, reduce={2: NO_COST, 4: NO_COST})


def seconds(layout: Layout, model: ModelCosts = MODEL, machine: MachineCosts = MACHINE) -> float:
    return predict(layout, model, machine).seconds


def test_one_device_takes_the_measured_step() -> None:
    assert seconds(Layout()) == 96 + 8


def test_replicas_share_the_batch_and_each_updates_all_weights() -> None:
    assert seconds(Layout(2)) == 48 + 8


def test_an_uneven_batch_takes_the_time_of_the_largest_share() -> None:
    assert seconds(Layout(3)) == 3 * 12 + 8


def test_the_micro_batches_of_replicas_are_those_of_the_whole_batch() -> None:
    """53 examples are 7 7 6 7 and 7 6 7 6: the last of the first replica has no backward pass of fewer examples."""
    found = predict(Layout(2, 2, 4), MODEL, MACHINE, batch=53).seconds
    full = Durations((14.0, 14.0), (28.0, 28.0), (28.0, 28.0), (0.0, 0.0), (0.0,), microbatch_scale=(1, 1, 6 / 7, 1))
    last_is_short = dataclasses.replace(full, microbatch_scale=(1, 1, 1, 6 / 7))
    in_order, other = (simulate(make("1f1b", 2, 4), one).step_seconds for one in (full, last_is_short))
    assert found == pytest.approx(in_order + 8 / 2 / 2), "each replica updates a half of the weights of a stage"
    assert in_order > other


def test_a_sharded_optimizer_divides_the_update() -> None:
    assert seconds(Layout(2, shard="optimizer")) == 48 + 4
    assert seconds(Layout(2, num_shards=2)) == 24 + 4
    assert seconds(Layout(2, num_shards=2, shard="optimizer")) == 24 + 2


def test_the_owner_of_the_most_bytes_updates_the_longest() -> None:
    uneven = dataclasses.replace(MODEL, variable_bytes=(100, 20, 20, 20))
    assert seconds(Layout(2, shard="optimizer"), uneven) == 48 + 8 * 100 / 160
    blocks = tuple(dataclasses.replace(block, variable_bytes=(30, 10)) for block in BLOCKS)
    of_stages = dataclasses.replace(MODEL, blocks=blocks)
    assert seconds(Layout(2, 2, 2), of_stages) == pytest.approx(seconds(Layout(2, 2, 2))), "30 10 and 30 10"
    four = Layout(4, 2, 2)
    assert seconds(four, of_stages) - seconds(four) == pytest.approx(4 * (30 / 80 - 1 / 4)), "30, 30, 10 and 10"


def test_in_one_process_the_first_replica_of_shards_updates_the_weights_that_stay_whole() -> None:
    model = dataclasses.replace(MODEL, blocks=(dataclasses.replace(BLOCKS[0], divided_bytes=0), *BLOCKS[1:]))
    divided, whole = 8 * 3 / 4 / 2, 8 / 4
    assert seconds(Layout(2, num_shards=2), model) == pytest.approx(24 + divided + whole)
    assert seconds(Layout(2, num_shards=2, shard="optimizer"), model) == pytest.approx(24 + divided / 2 + whole)
    hosts = dataclasses.replace(MACHINE, num_hosts=2, network=NO_COST)
    on_hosts = Layout(2, num_shards=2, num_hosts=2, shard="optimizer")
    assert seconds(on_hosts, model, hosts) == pytest.approx(24 + divided / 2 + whole / 2)


def test_the_sum_of_gradients_adds_its_latency_and_bytes() -> None:
    slow = dataclasses.replace(MACHINE, reduce={2: Link(0.5, 160.0)})
    assert seconds(Layout(2), machine=slow) == 48 + 4 * 0.5 + 1 + 8


def test_a_replica_under_tf_distribute_adds_its_own_seconds() -> None:
    assert seconds(Layout(2), dataclasses.replace(MODEL, replica_seconds=3.0)) == 48 + 8 + 3


def test_devices_that_share_cores_slow_each_other_down() -> None:
    shared = dataclasses.replace(MACHINE, slowdown={1: 1.0, 2: 1.5})
    assert seconds(Layout(2), machine=shared) == 1.5 * (48 + 8)
    assert seconds(Layout(), machine=shared) == 96 + 8


def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    # two equal stages of 6 seconds an example, 4 micro-batches of 2 examples: 5 of them one after another
    found = predict(Layout(1, 2, 4), MODEL, MACHINE)
    assert found.seconds == pytest.approx(5 * 12 + 4)
    assert found.waits["bubble"] == pytest.approx(12)


def test_recomputation_adds_the_forward_pass_but_for_the_last_block_of_a_stage() -> None:
    assert seconds(Layout(1, 2, 4, recompute=True)) == pytest.approx(5 * (12 + 2) + 4)


def test_a_split_backward_pass_fills_the_bubble() -> None:
    assert seconds(Layout(1, 2, 4, "zero_bubble")) < seconds(Layout(1, 2, 4))


def test_a_split_backward_pass_takes_longer_where_a_stage_has_gradients_of_its_inputs() -> None:
    """A micro-batch takes 12 seconds on a stage: a quarter more on the last one, and as long as before on the first."""
    split = dataclasses.replace(MODEL, split_factor=1.25)
    expected = Durations((4.0, 4.0), (8.0,) * 2, (4.0, 5.5), (4.0, 5.5), (0.0,))
    found = seconds(Layout(1, 2, 4, "zero_bubble"), split)
    assert found == pytest.approx(simulate(make("zero_bubble", 2, 4), expected).step_seconds + 4)
    assert seconds(Layout(1, 2, 4), split) == seconds(Layout(1, 2, 4))


@pytest.mark.parametrize("untrained", [slice(0, 2), slice(2, 4)], ids=["first stage", "last stage"])
def test_a_pass_is_not_split_where_a_stage_or_all_before_it_have_no_trained_weights(untrained: slice) -> None:
    blocks = [*BLOCKS]
    blocks[untrained] = [dataclasses.replace(block, trainable_bytes=0) for block in BLOCKS[untrained]]
    model = dataclasses.replace(MODEL, blocks=tuple(blocks))
    layout = Layout(1, 2, 4, "zero_bubble")
    assert seconds(layout, dataclasses.replace(model, split_factor=1.25)) == seconds(layout, model)


@pytest.mark.parametrize("layout", [Layout(1, 2, 4), Layout(num_shards=2), Layout(2, shard="weights")], ids=str)
def test_devices_that_divide_the_model_slow_each_other_down_as_micro_batches_do(layout: Layout) -> None:
    shared = dataclasses.replace(MACHINE, slowdown={1: 1.0, 2: 1.5})
    less = dataclasses.replace(shared, slowdown_of_stages={1: 1.0, 2: 1.25})
    assert seconds(layout, machine=MACHINE) < seconds(layout, machine=less) < seconds(layout, machine=shared)
    assert seconds(Layout(2), machine=less) == seconds(Layout(2), machine=shared)


def test_a_pipeline_is_predicted_from_a_measured_pipeline_of_one_stage() -> None:
    slower = dataclasses.replace(MODEL, staged=Curve((1, 2), (24.0, 48.0)))
    assert seconds(Layout(1, 2, 4), slower) == pytest.approx(2 * 5 * 12 + 4)


def test_replicas_of_a_pipeline_share_the_batch() -> None:
    assert seconds(Layout(2, 2, 2)) == pytest.approx(3 * 12 + 4 / 2)


def test_divided_layers_share_the_work_of_each_layer() -> None:
    assert seconds(Layout(num_shards=2)) == pytest.approx(48 + 4)


def test_each_shard_starts_the_operations_of_a_divided_layer() -> None:
    """The first layer has more to start, which may be the reading of its weights: they are divided."""
    starts = [5.0, 1.0, 1.0, 1.0]
    blocks = tuple(
        dataclasses.replace(block, forward=Line(start, 1.0)) for block, start in zip(BLOCKS, starts, strict=True)
    )
    started = dataclasses.replace(MODEL, blocks=blocks, compute=Curve((8,), (96.0 + sum(starts),)))
    assert seconds(Layout(num_shards=2), started) == pytest.approx(4 * 1 + (5 - 1) / 2 + 48 + 4)


def test_whole_layers_and_the_loss_are_computed_on_each_shard() -> None:
    whole = tuple(dataclasses.replace(block, is_divided=False, divided_bytes=0) for block in BLOCKS)
    assert seconds(Layout(num_shards=2), dataclasses.replace(MODEL, blocks=whole)) == pytest.approx(96 + 8)


def test_sums_of_activations_count_for_divided_layers() -> None:
    summed = tuple(dataclasses.replace(block, summed=Bytes(0, 20)) for block in BLOCKS)
    slow = dataclasses.replace(MACHINE, exchange={2: Link(0.0, 160.0)})
    assert seconds(Layout(num_shards=2), dataclasses.replace(MODEL, blocks=summed), slow) == pytest.approx(48 + 4 + 4)


def test_slow_data_is_waited_for() -> None:
    found = predict(Layout(), dataclasses.replace(MODEL, data_seconds=110.0), MACHINE)
    assert found.seconds == 110
    assert found.waits["data"] == 6


def test_reading_data_takes_the_cores_of_logical_cpus() -> None:
    read = dataclasses.replace(MODEL, data_core_seconds=20.0)
    shared = dataclasses.replace(MACHINE, num_cores=4)
    found = predict(Layout(4), read, shared)
    assert found.seconds == seconds(Layout(4)) + 20 / 4
    assert found.waits["reading data"] == 5
    assert seconds(Layout(4), read, MACHINE) == seconds(Layout(4)), "GPUs leave all cores to the data"
    assert seconds(Layout(), read, shared) == seconds(Layout()), "three cores are free"


def test_stated_devices_bring_cores_of_their_own() -> None:
    machine = Stated(num_devices=8).applied(dataclasses.replace(MACHINE, num_measured=2, num_cores=2))
    assert (machine.num_devices, machine.num_cores) == (8, 8)
    assert Stated(num_devices=8).applied(MACHINE).num_cores == 0


def test_reading_data_takes_the_bubble_of_a_pipeline_first() -> None:
    two_cores = dataclasses.replace(MACHINE, num_cores=2)
    pipeline = Layout(num_stages=2, num_microbatches=2)
    free = 2 * predict(pipeline, MODEL, MACHINE).waits["bubble"]
    read = dataclasses.replace(MODEL, data_core_seconds=free + 6.0)
    assert seconds(pipeline, read, two_cores) == pytest.approx(seconds(pipeline) + 6 / 2)


def test_a_planned_device_of_another_speed_computes_in_proportion() -> None:
    assert seconds(Layout(), machine=dataclasses.replace(MACHINE, speed=2.0)) == (96 + 8) / 2


def test_hosts_add_an_all_reduce_over_the_network() -> None:
    linked = dataclasses.replace(MACHINE, num_hosts=2, network=Link(1.0, 160.0))
    assert seconds(Layout(2, num_hosts=2), machine=linked) == 48 + 8 + 1 + 2 * 1


def test_a_ring_through_replicas_of_one_host_waits_for_the_link_between_hosts_only_where_it_leaves_a_host() -> None:
    def added(layout: Layout) -> float:
        linked, free = (dataclasses.replace(MACHINE, num_hosts=2, network=one) for one in (Link(1.0, 1e30), NO_COST))
        return seconds(layout, machine=linked) - seconds(layout, machine=free)

    assert added(Layout(2, num_hosts=2)) == pytest.approx(2)
    assert added(Layout(8, num_hosts=2)) == pytest.approx(4), "of the 14 neighbours that a part passes"
    assert added(Layout(8, num_hosts=2, shard="optimizer")) == pytest.approx(4 + 2), "and new weights, once"


def test_replicas_of_several_hosts_are_summed_in_that_ring_alone_and_stages_on_each_host_first() -> None:
    def added(layout: Layout) -> float:
        slow = dataclasses.replace(MACHINE, num_hosts=2, network=NO_COST, reduce={2: Link(5.0, 1e30)})
        free = dataclasses.replace(slow, reduce={2: NO_COST})
        return seconds(layout, machine=slow) - seconds(layout, machine=free)

    assert added(Layout(4, num_hosts=2)) == added(Layout(4, num_hosts=2, shard="optimizer")) == 0
    assert added(Layout(2)) > 0
    assert added(Layout(4, 2, 2, num_hosts=2)) > 0


def test_the_stages_of_a_host_share_its_link_and_the_last_one_sums_first() -> None:
    layout, slow = Layout(2, 2, 4, num_hosts=2), Link(0.0, 1.0)
    hosts = dataclasses.replace(MACHINE, num_hosts=2, network=slow)
    one_host = seconds(Layout(1, 2, 4), dataclasses.replace(MODEL, batch=MODEL.batch // 2))  # updates half of all, too
    added = seconds(layout, machine=hosts) - one_host
    sent_seconds = slow.seconds(MODEL.trainable_bytes)
    assert 0.7 * sent_seconds < added < sent_seconds, "during the backward pass of the first stage"
    assert predict(layout, MODEL, hosts).waits["network"] == pytest.approx(added)


def test_faster_devices_do_not_shorten_the_network() -> None:
    linked = dataclasses.replace(MACHINE, num_hosts=2, network=Link(1.0, 160.0), speed=2.0)
    assert predict(Layout(2, num_hosts=2), MODEL, linked).waits["network"] == pytest.approx(1 + 2 * 1)


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        (Layout(2, num_hosts=2), 1.5),
        (Layout(4, num_hosts=2), 1.5),
        (Layout(8, num_hosts=2), 2.0),  # four of them own a weight, and send as much as if each did
        (Layout(4, 2, 4, num_hosts=2), 1.5),  # each stage has one sum with the other host
        (Layout(4, 2, 4, num_hosts=4), 1.5),
    ],
    ids=str,
)
def test_divided_state_sends_the_new_weights_too(layout: Layout, factor: float) -> None:
    machine = dataclasses.replace(MACHINE, num_hosts=layout.num_hosts)

    def network(shard: Shard) -> float:
        chosen = dataclasses.replace(layout, shard=shard)
        links = [Link(0.0, 160.0), Link(0.0, 320.0)]
        slow, fast = (seconds(chosen, machine=dataclasses.replace(machine, network=link)) for link in links)
        return 2 * (slow - fast)

    assert network("optimizer") == pytest.approx(factor * network(None))


ACROSS = Layout(1, 4, 8, num_hosts=2, across_hosts=True)
CUT = dataclasses.replace(MODEL, blocks=tuple(dataclasses.replace(block, cut=Bytes(0, 10)) for block in BLOCKS))


def across(cut_seconds: float, model: ModelCosts = CUT, layout: Layout = ACROSS) -> float:
    """Return the step on two hosts of two devices where a micro-batch takes some seconds from one to the other."""
    link = Link(0.0, 10 / cut_seconds)
    return seconds(layout, model, dataclasses.replace(MACHINE, num_hosts=2, network=link))


def test_a_pipeline_across_hosts_takes_as_long_as_one_of_a_host_but_for_its_transfers() -> None:
    one_host = seconds(Layout(1, 4, 8), CUT)
    assert across(1e-9) == pytest.approx(one_host)
    # Its first micro-batch and its last gradients cross the network; more micro-batches in flight hide the others.
    assert one_host + 2 * 0.5 <= across(0.5) < one_host + 4 * 0.5


def test_transfers_between_hosts_are_waited_for_where_backward_passes_are_split() -> None:
    split = dataclasses.replace(ACROSS, schedule="zero_bubble")
    assert across(0.5, layout=split) > across(1e-9, layout=split)


def test_devices_of_other_hosts_do_not_slow_a_stage_down() -> None:
    shared = dataclasses.replace(MACHINE, slowdown={1: 1.0, 2: 1.5, 4: 3.0}, num_hosts=2, network=NO_COST)
    two = dataclasses.replace(shared, slowdown={1: 1.0, 2: 1.5})
    assert seconds(ACROSS, machine=shared) == seconds(ACROSS, machine=two)
    assert seconds(Layout(1, 4, 8), machine=shared) > seconds(Layout(1, 4, 8), machine=two)


def test_a_pipeline_across_hosts_is_a_candidate_with_its_settings() -> None:
    found = [one for one in candidates(2, 2, 64, num_blocks=4, divides_layers=False) if isinstance(one, Layout)]
    pipelines = {str(one): one for one in found if one.across_hosts}
    assert {one.num_stages for one in pipelines.values()} == {2, 4}, "one or both devices of each host"
    assert pipelines["Pipeline(4, 4, across_workers, hosts=2)"].settings == {
        "kind": "pipeline", "num_stages": 4, "num_microbatches": 4, "across_workers": True,
    }  # fmt: skip
    assert ACROSS.settings_on(["GPU:0", "GPU:1"])["devices"] == ["0/GPU:0", "0/GPU:1", "1/GPU:0", "1/GPU:1"]


def test_stages_balance_the_time_of_their_blocks() -> None:
    heavy = (dataclasses.replace(BLOCKS[0], backward=Line(0, 8.0)), *BLOCKS[1:])
    stages = stages_of(dataclasses.replace(MODEL, blocks=heavy), Layout(1, 2, 4), 8)
    assert [len(stage) for stage in stages] == [1, 3]


def test_the_candidates_cover_every_kind_on_all_and_on_fewer_devices() -> None:
    found = [one for one in candidates(4, 1, 64, num_blocks=3, divides_layers=True) if isinstance(one, Layout)]
    assert {layout.kind for layout in found} == {
        "single_device", "mirrored", "pipeline", "hybrid", "tensor_parallel",
    }  # fmt: skip
    assert {layout.num_devices for layout in found} == {1, 2, 4}
    assert {layout.shard for layout in found} == {None, "optimizer", "weights"}
    assert {(one.schedule, one.recompute) for one in found} == {("1f1b", False), ("1f1b", True), ("zero_bubble", False)}


@pytest.mark.parametrize(
    ("number", "tried"), [(1, {1}), (3, {1, 2, 3}), (4, {1, 2, 4}), (6, {1, 2, 3, 4, 6}), (12, {1, 2, 4, 6, 8, 12})]
)
def test_candidates_use_all_devices_half_of_them_or_a_power_of_two(number: int, tried: set[int]) -> None:
    found = [one for one in candidates(number, 1, 64, num_blocks=16, divides_layers=True) if isinstance(one, Layout)]
    assert {layout.num_devices for layout in found} == tried


def test_the_state_of_grids_is_divided_where_their_strategy_does_not_do_so_anyway() -> None:
    def grids_with_state(num_devices: int, num_hosts: int) -> set[str]:
        found = candidates(num_devices, num_hosts, 10**4, num_blocks=4, divides_layers=True)
        divided = [one for one in found if isinstance(one, Layout) and one.shard == "optimizer"]
        return {one.kind for one in divided} - {"mirrored", "multi_worker"}

    assert grids_with_state(4, 1) == {"tensor_parallel"}
    assert grids_with_state(2, 2) == {"hybrid", "tensor_parallel"}
    assert grids_with_state(2, 1) == set(), "one replica of two shards"


def test_what_is_never_tried_is_no_candidate_and_the_rest_is() -> None:
    found = [one for one in candidates(6, 2, 10**4, num_blocks=99, divides_layers=True) if isinstance(one, Layout)]
    assert {one.schedule for one in found} == {"1f1b", "zero_bubble"}
    assert {one.num_microbatches // one.num_stages for one in found if one.num_stages > 1} == {1, 2, 4, 8}
    assert {one.shard for one in found if one.num_stages > 1 or one.num_shards > 1} == {None, "optimizer"}
    assert {one.num_devices // one.num_hosts for one in found} == {1, 2, 3, 4, 6}
    assert "5 of 6 devices" in " ".join(never_tried(6, 2, 99, divides_layers=True))
    assert "devices but 1, 2, 4, 8, 16" in " ".join(never_tried(16, 1, 99, divides_layers=True))


def test_shards_are_candidates_on_several_hosts_as_replicas_of_each() -> None:
    found = [one for one in candidates(2, 2, 64, num_blocks=3, divides_layers=True) if isinstance(one, Layout)]
    settings = {str(one): one.settings for one in found}
    assert settings["Hybrid(2 x TensorParallel(2), hosts=2)"] == {"kind": "tensor_parallel", "num_shards": 2}


def test_shards_on_two_hosts_take_as_long_as_those_of_one_with_half_the_batch_and_the_network() -> None:
    link = Link(latency_seconds=0.5, bytes_per_second=320.0)
    hosts = dataclasses.replace(MACHINE, num_hosts=2, network=link)
    one = predict(Layout(num_shards=2), MODEL, MACHINE, batch=4).seconds
    two = predict(Layout(2, num_shards=2, num_hosts=2), MODEL, hosts, batch=8).seconds
    # Sent once, and again: of two hosts half.
    assert two == pytest.approx(one + link.seconds(MODEL.trainable_bytes, num_messages=2))


def test_shards_on_several_hosts_are_one_compiled_stage() -> None:
    """A micro-batch of the stage takes twice as long as the same part of a step of one device."""
    staged = dataclasses.replace(MODEL, staged=Curve((4, 8), (96.0, 192.0)))
    hosts = dataclasses.replace(MACHINE, num_hosts=2, network=Link(0.0, 1e12))
    layout = Layout(2, num_shards=2, num_hosts=2)
    assert seconds(layout, staged, hosts) - seconds(layout, MODEL, hosts) == pytest.approx(4 * 12 / 2)
    assert seconds(Layout(num_shards=2), staged) == seconds(Layout(num_shards=2), MODEL)


def test_candidates_are_refused_with_the_reason() -> None:
    found = [one for one in candidates(4, 1, 3, num_blocks=2, divides_layers=False) if isinstance(one, Refusal)]
    assert {str(one.layout): one.reason for one in found} == {
        "Mirrored(4)": "the batch has 3 examples",
        'Mirrored(4, shard="optimizer")': "the batch has 3 examples",
        'Mirrored(4, shard="weights")': "the batch has 3 examples",
        "Hybrid(2 x Pipeline(2, 2))": "the batch has 3 examples",
        "Pipeline(4, 4)": "2 blocks",
    }


def test_replicas_are_refused_for_layers_that_mix_examples() -> None:
    found = list(candidates(2, 1, 8, num_blocks=0, divides_layers=False, mixing=["norm"]))
    assert found == [
        Layout(),
        Refusal(Layout(2), "norm mixes examples"),
        Refusal(Layout(2, shard="optimizer"), "norm mixes examples"),
    ]


def test_micro_batches_larger_than_measured_grow_as_the_whole_model_does() -> None:
    staged = dataclasses.replace(MODEL, staged=Curve((1, 2), (14.0, 28.0)))
    assert staged.staged_seconds(2) == 28
    assert staged.staged_seconds(4) == 28 + 24  # compute: 12 s an example


def test_shards_compute_the_loss_from_pieces_of_the_outputs() -> None:
    """Of 12 seconds of an example 3 are the loss; of pieces it takes 1 second, half of it on each shard."""
    gathered = dataclasses.replace(MODEL, loss_seconds=3.0)
    in_pieces = dataclasses.replace(gathered, loss_of_pieces_seconds=1.0)
    assert seconds(Layout(num_shards=2), gathered) == pytest.approx(8 * (9 / 2 + 3) + 4)
    assert seconds(Layout(num_shards=2), in_pieces) == pytest.approx(8 * (9 / 2 + 1 / 2) + 4)
    assert seconds(Layout(), in_pieces) == seconds(Layout(), gathered) == 96 + 8

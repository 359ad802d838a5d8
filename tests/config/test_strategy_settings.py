"""The settings of each kind of strategy, and the strategy that is created from them."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest

import tfpar
from tfpar import config, strategies
from tfpar.config import bundled_configurations

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        (config.SingleDevice, tfpar.SingleDevice),
        (config.Mirrored, tfpar.Mirrored),
        (config.MultiWorker, tfpar.MultiWorker),
        (config.Pipeline, tfpar.Pipeline),
    ],
)
def test_a_kind_has_the_settings_that_are_arguments_of_its_strategy(settings: Any, strategy: Any) -> None:
    arguments = {name: argument.default for name, argument in inspect.signature(strategy).parameters.items()}
    fields = {
        name: inspect.Parameter.empty if field.is_required() else field.default
        for name, field in settings.model_fields.items()
    }
    assert arguments == {name: fields[name] for name in fields if name not in ("kind", "num_logical_cpus")}


def test_a_kind_of_a_grid_has_the_settings_that_are_arguments_of_the_grid_and_of_its_replicas() -> None:
    """Those of `Hybrid` that both have are of the grid; the number of micro-batches has another description only."""
    grid = inspect.signature(tfpar.Hybrid.__init__).parameters
    of_grid = {name: grid[name].default for name in grid if name not in ("self", "pipeline")}
    for settings, strategy, without in (
        (config.Hybrid, tfpar.Pipeline, set()),
        # The all-reduce of a job is that which all workers can run.
        (config.TensorParallel, tfpar.TensorParallel, {"all_reduce"}),
    ):
        inner = {name: argument.default for name, argument in inspect.signature(strategy).parameters.items()}
        arguments = {name: default for name, default in (inner | of_grid).items() if name not in without}
        fields = {
            name: inspect.Parameter.empty if field.is_required() else field.default
            for name, field in settings.model_fields.items()
        }
        assert arguments == {name: fields[name] for name in fields if name not in ("kind", "num_logical_cpus")}


@pytest.mark.parametrize(
    ("settings", "described"),
    [
        (config.Auto(devices=("CPU:1",)), "SingleDevice on CPU:1"),
        (config.Auto(devices=("CPU:1", "CPU:2")), "Mirrored over 2 replicas on CPU:1, CPU:2"),
        (config.SingleDevice(device="CPU:1"), "SingleDevice on CPU:1"),
        (config.Mirrored(devices=("CPU:0", "CPU:1")), "Mirrored over 2 replicas on CPU:0, CPU:1"),
        (
            config.Mirrored(devices=("CPU:0", "CPU:1"), shard="optimizer"),
            "Mirrored over 2 replicas on CPU:0, CPU:1, optimizer state sharded",
        ),
        (
            config.Mirrored(devices=("CPU:0", "CPU:1"), shard="weights"),
            "Mirrored over 2 replicas on CPU:0, CPU:1, weights sharded",
        ),
        (
            config.MultiWorker(devices=("CPU:1", "CPU:2"), shard="optimizer"),
            "MultiWorker over 1 worker, 2 replicas, optimizer state sharded; this is worker 0 on CPU:1, CPU:2",
        ),
        (
            config.MultiWorker(devices=("CPU:1", "CPU:2"), shard="weights"),
            "MultiWorker over 1 worker, 2 replicas on CPU:1, CPU:2, weights sharded",
        ),
        (
            config.Pipeline(num_stages=2, num_microbatches=4, devices=("CPU:2", "CPU:3")),
            "Pipeline of 2 stages on CPU:2, CPU:3, 4 micro-batches, 1f1b",
        ),
        (
            config.Hybrid(num_stages=1, num_microbatches=4, num_replicas=2, num_shards=2),
            "Hybrid of 2 replicas of 1 stage of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3), 4 micro-batches, 1f1b",
        ),
        (
            config.Hybrid(num_stages=2, num_microbatches=4, num_replicas=2, shard="optimizer"),
            "Hybrid of 2 replicas of 2 stages on (CPU:0 CPU:1), (CPU:2 CPU:3), 4 micro-batches, 1f1b, optimizer state "
            "sharded",
        ),
        (
            config.TensorParallel(num_shards=2, devices=("CPU:2", "CPU:3"), layout={"up/kernel": (None, "model")}),
            "TensorParallel of 2 shards on CPU:2, CPU:3",
        ),
        (
            config.TensorParallel(num_shards=2, num_replicas=2),
            "Hybrid of 2 replicas of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3)",
        ),
        (
            config.TensorParallel(num_shards=2, num_replicas=2, shard="optimizer"),
            "Hybrid of 2 replicas of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3), optimizer state sharded",
        ),
    ],
)
def test_settings_become_their_strategy(settings: config.Strategy, described: str) -> None:
    assert strategies.from_settings(settings).describe() == described


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config.Mirrored(devices=("CPU:0", "CPU:0")), "must name different devices"),
        (config.Auto(devices=("CPU:9",)), "must name different devices"),
        (config.Mirrored(all_reduce="nccl"), "all_reduce='nccl' needs GPUs"),
        (config.MultiWorker(every=2), "every and average_optimizer belong to sync='average'"),
        (config.MultiWorker(sync="average", compression="bfloat16"), "compression rounds gradients"),
        (config.MultiWorker(sync="average", shard="optimizer"), "takes all of the optimizer's state"),
        (config.Pipeline(num_stages=2, num_microbatches=2, balance=(3,)), "balance"),
        (config.Pipeline(num_stages=2, num_microbatches=2, layout={"up": ("model",)}), "rules and num_shards=1"),
    ],
)
def test_settings_are_judged_by_the_constructor_of_their_strategy(settings: config.Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategies.from_settings(settings)


def test_another_layout_keeps_the_settings_that_are_no_part_of_a_layout() -> None:
    auto = config.Auto(batch_dependent_layers="gather", form_seconds=60.0, num_logical_cpus=4)
    assert config.with_layout(auto, {"kind": "mirrored", "num_logical_cpus": 2}) == config.Mirrored(
        num_logical_cpus=2, batch_dependent_layers="gather"
    )
    pipeline = {"kind": "pipeline", "num_stages": 2, "num_microbatches": 4}
    assert config.with_layout(auto, pipeline) == config.Pipeline(num_stages=2, num_microbatches=4, form_seconds=60.0)


@pytest.mark.parametrize("kind", ["single_device", "mirrored", "multi_worker"])
def test_a_flag_changes_the_kind_of_a_file_that_lists_all_settings_at_their_default(kind: str) -> None:
    override = f"strategy.kind={kind}"
    listed = config.load(bundled_configurations.find("digits"), [override])
    assert listed.strategy == config.load(None, [override]).strategy


def test_a_setting_of_another_kind_that_was_changed_is_refused_with_the_way_to_replace_the_section() -> None:
    pipeline = bundled_configurations.find("digits_pipeline")
    with pytest.raises(ValueError, match=r"--set 'strategy=\{kind=\"mirrored\"\}' replaces the section"):
        config.load(pipeline, ["strategy.kind=mirrored"])
    assert config.load(pipeline, ['strategy={kind="mirrored"}']).strategy == config.Mirrored()


def test_a_run_with_sharded_state_can_end_in_one_process_of_one_replica() -> None:
    strategy = strategies.from_settings(config.TensorParallel(num_shards=2, shard="optimizer"))
    assert strategy.describe().startswith("TensorParallel of 2 shards")


@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        (config.Mirrored(num_logical_cpus=4), 2),
        (config.MultiWorker(num_logical_cpus=4), 2),
        (config.Pipeline(num_stages=4, num_microbatches=4, num_logical_cpus=4), 2),
        (config.Mirrored(num_logical_cpus=4, devices=("CPU:0", "CPU:1")), 4),
        (config.SingleDevice(), None),
    ],
)
def test_logical_cpus_divide_the_cores(settings: config.Strategy, num_threads: int | None) -> None:
    with (
        mock.patch("tfpar.cluster.cores.num_allowed_cores", return_value=8),
        mock.patch("tfpar.cluster.use_logical_cpus") as split,
    ):
        strategies.from_settings(settings)
    assert [call.args for call in split.call_args_list] == ([] if num_threads is None else [(4, num_threads)])


def test_the_way_to_replace_a_section_is_said_only_where_it_is_enough() -> None:
    hybrid = bundled_configurations.find("digits_hybrid")
    with pytest.raises(ValueError, match="num_replicas") as raised:
        config.load(hybrid, ["strategy.kind=pipeline"])
    assert "replaces the section" not in str(raised.value)

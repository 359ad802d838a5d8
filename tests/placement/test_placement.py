"""The operations of a training step would run where they should if its devices were GPUs."""

from __future__ import annotations

import re

import pytest

import tfpar
from tests.support import placement_cases
from tests.support.device_placement import Placed, Transfer
from tfpar.engines.one_device import OneDevice

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]
NAMES = list(placement_cases.STRATEGIES)
each_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow_start] * ("multi_worker" in name)) for name in NAMES]
)
each_model = pytest.mark.parametrize("model", placement_cases.MODELS)
REPLICATED = ("mirrored", "mirrored, sharded", "multi_worker", "multi_worker, sharded", "hybrid")
PIPELINES = ("pipeline", "gpipe", "hybrid")

# What the host waits for: the kind of the operation on a GPU and of its first reader, and the reason.
WAITS_OF_KERAS_AND_TENSORFLOW = {
    ("BitwiseAnd", "Less"): "keras.ops.argmax of `accuracy` tells -0.0 from 0.0; TensorFlow compares int32 on the host",
    ("SelectV2", "Reshape"): "keras.ops.take replaces negative rows; TensorFlow's gradient of a lookup flattens them",
    ("Identity", "LoopCond"): "the condition of Keras' loop over time steps",
    ("TensorListPopBack", "BroadcastGradientArgs"): "tf.while_loop saves shapes for its gradient in lists",
    ("TensorListPopBack", "TensorListReserve"): "the same",
    ("TensorListPopBack", "TensorListSetItem"): "the same",
}
LOOKUP = "keras.ops.take replaces negative rows, and what a function returns in int32 TensorFlow keeps on the host"
# What tfpar itself makes the host wait for; a repair deletes its line.
WAITS_OF_TFPAR: dict[str, dict[tuple[str, str], str]] = {name: {} for name in NAMES}
# A stage saves the rows of a lookup for its backward pass, where TensorFlow's gradient takes their size.
WAITS_OF_TFPAR |= {name: {("SelectV2", "Identity"): LOOKUP} for name in PIPELINES}


@pytest.mark.few(1)
@each_model
@each_strategy
def test_no_operation_of_the_host_lies_between_two_of_a_gpu(strategy: str, model: str) -> None:
    assert placement_cases.case(strategy, model).reading.on_host == ()


@pytest.mark.few(1)
@each_model
@each_strategy
def test_each_operation_of_a_layer_runs_on_the_gpu_of_its_replica_or_stage(strategy: str, model: str) -> None:
    case = placement_cases.case(strategy, model)
    of_layers = [(layer, one) for one in case.reading.operations for layer in case.stages if _is_of(layer, one.name)]
    assert {layer for layer, _ in of_layers} == set(case.stages)
    wrong = [
        one
        for layer, one in of_layers
        if one.device != _home(strategy, case.stages[layer], one) and not (one.device == "CPU:0" and _is_of_sizes(one))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def _is_of(layer: str, name: str) -> bool:
    return re.search(rf"(^|/){layer}(_\d+)*/", name) is not None


def _is_of_sizes(operation: Placed) -> bool:
    """Whether an operation computes shapes of a product or of moments."""
    return operation.kind in ("GatherV2", "Prod") and bool(re.search("/(Tensordot|moments)/", operation.name))


def _home(strategy: str, stage: str, operation: Placed) -> str:
    if strategy in REPLICATED:
        return "GPU:1" if "replica_1/" in operation.name else "GPU:0"
    return stage


@pytest.mark.few(2)
@each_model
@each_strategy
def test_sizes_bounds_and_predicates_stay_on_the_host(strategy: str, model: str) -> None:
    known = WAITS_OF_KERAS_AND_TENSORFLOW | WAITS_OF_TFPAR[strategy]
    unknown = [one for one in placement_cases.case(strategy, model).reading.waits if _kinds(one) not in known]
    assert not unknown, "\n".join(map(str, unknown))


def _kinds(wait: Transfer) -> tuple[str, str]:
    return wait.source_kind, wait.consumer_kind


@pytest.mark.few(2)
@each_model
@pytest.mark.parametrize("strategy", ["single_device", "mirrored"])
def test_no_place_waits_for_the_end_of_operations_of_another(strategy: str, model: str) -> None:
    """The host then launches the next step while a GPU still computes this one."""
    ordered = placement_cases.case(strategy, model).reading.ordered
    assert not ordered, "\n".join(map(str, ordered))


@pytest.mark.extended
@pytest.mark.slow_start
def test_every_wait_that_is_named_is_still_there() -> None:
    found = {
        name: {
            _kinds(wait) for model in placement_cases.MODELS for wait in placement_cases.case(name, model).reading.waits
        }
        for name in NAMES
    }
    assert not set(WAITS_OF_KERAS_AND_TENSORFLOW) - set().union(*found.values())
    assert {name: set(WAITS_OF_TFPAR[name]) - found[name] for name in NAMES} == {name: set() for name in NAMES}


@each_model
@each_strategy
def test_nothing_of_one_replica_or_stage_passes_the_gpu_of_another(strategy: str, model: str) -> None:
    detours = placement_cases.case(strategy, model).reading.detours
    assert not detours, "\n".join(map(str, detours))


@each_model
@each_strategy
def test_the_update_of_a_weight_runs_on_the_gpu_of_the_weight(strategy: str, model: str) -> None:
    reading = placement_cases.case(strategy, model).reading
    # Rows of an embedding have Keras' own update, with a root of its second moments after that of a scalar.
    updates = [
        one
        for one in reading.operations
        if one.kind == "ResourceApplyAdam" or (one.kind == "Sqrt" and re.search(r"adam[^/]*/Sqrt_[1-9]", one.name))
    ]
    assert {one.device for one in updates} == ({"GPU:0"} if strategy == "single_device" else {"GPU:0", "GPU:1"})
    sent = [one for one in reading.moves if one.source_kind in ("Sqrt", "Square") and "adam" in one.source]
    assert not sent, "\n".join(map(str, sent))


@each_model
@each_strategy
def test_each_tensor_of_a_batch_enters_each_gpu_once(strategy: str, model: str) -> None:
    entries = placement_cases.case(strategy, model).reading.entries
    assert entries
    for (number, device), count in entries.items():
        # Micro-batches that are cut on the host enter one by one, the targets once more: those that metrics count.
        from_host = strategy in PIPELINES and model != "cnn" and number == 0
        most = placement_cases.NUM_MICROBATCHES * (1 + (number == 1)) if from_host else 1
        assert count <= most, (number, device, count)


@pytest.mark.few(1)
@each_model
@pytest.mark.parametrize(
    "strategy",
    [
        "single_device",
        "mirrored",
        "mirrored, sharded",
        "pipeline",
        "gpipe",
        "hybrid",
        pytest.param("multi_worker", marks=pytest.mark.slow_start),
    ],
)
def test_each_batch_enters_each_gpu_ahead_of_its_step(strategy: str, model: str) -> None:
    entering = placement_cases.case(strategy, model).reading.entering
    ahead = [one for one in entering if re.fullmatch(r"AssignVariableOp[^/]*", one.consumer)]  # the following batch
    has_tokens = model != "cnn"  # integers of 32 bits, which enter in the step, as all inputs of a first stage
    others = ["GPU:1"] if strategy in ("pipeline", "gpipe") and has_tokens else ["GPU:0", "GPU:1"]
    assert sorted(one.target for one in ahead) == (["GPU:0"] if strategy == "single_device" else others)
    late = {one.dtype for one in entering if one not in ahead}
    # The sizes and the weight of replicas are scalars of the host.
    assert late <= ({"int32", "int64", "float64"} if strategy in REPLICATED else {"int32"})


def test_a_single_device_without_a_name_is_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is around its steps runs on the host."""
    monkeypatch.setattr(OneDevice, "device_names", ["CPU:1"])  # in place of GPU:0
    reading = placement_cases.read(tfpar.SingleDevice(), "cnn").reading
    assert {one.device for one in reading.operations if one.kind in ("Conv2D", "MatMul")} == {"GPU:0"}

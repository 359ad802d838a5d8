"""Training on GPUs: all-reduces and packs, batches ahead, XLA, checkpoints, predictions and stages by measured time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import gpu_machine, parity_cases, small
from tests.support.device_placement import read_placement
from tfpar import cluster
from tfpar.engines.steps import launched_steps
from tfpar.engines.steps.batches_ahead import BatchesAhead, StepBatch
from tfpar.loops.model_function import make_model
from tfpar.loops.preparation import Preparation
from tfpar.strategies.mirrored import AllReduce

pytestmark = pytest.mark.gpu


def wide() -> keras.Model:
    """Gradients of 12 bytes to 16 KB: smaller and larger than a pack."""
    return parity_cases.classifier(
        lambda: keras.optimizers.Adam(0.01), layers=lambda: [keras.layers.Dense(64, "tanh"), keras.layers.Dense(64)]
    )()


@pytest.mark.parametrize("pack_bytes", [None, 64, 5000])
@pytest.mark.parametrize("all_reduce", get_args(AllReduce))
def test_every_all_reduce_in_packs_of_any_size_equals_one_device(
    gpus: list[str], all_reduce: Any, pack_bytes: int | None
) -> None:
    if all_reduce == "nccl" and gpu_machine.num_cards() < 2:
        pytest.skip("NCCL needs two physical GPUs")
    if all_reduce == "hierarchical_copy" and gpus[0].startswith("CPU"):
        pytest.skip("it needs GPUs")
    small.assert_trains_as_one_device(wide, small.data, lambda: tfpar.Mirrored(gpus[:2], all_reduce, pack_bytes))


def test_a_second_model_of_another_shape_trains_in_one_process(gpus: list[str]) -> None:
    """TensorFlow's default all-reduce crashes here."""
    for build in (small.build_model, wide):
        small.assert_trains_as_one_device(build, small.data, lambda: tfpar.Mirrored(gpus[:4]))


DATA: dict[str, Callable[[], Any]] = {
    "dataset": small.data,
    "prefetched by the user": lambda: small.data().prefetch(2),
    "endless": lambda: small.data().repeat(),
}
SPLITTING: dict[str, Callable[[list[str]], tfpar.Strategy]] = {
    "single device": lambda gpus: tfpar.SingleDevice(gpus[1]),
    "mirrored": lambda gpus: tfpar.Mirrored(gpus[:2]),
    "pipeline": lambda gpus: tfpar.Pipeline(2, 2, devices=gpus[:2]),
}
each_strategy = pytest.mark.parametrize("strategy", SPLITTING)


@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize("kind", DATA)
@each_strategy
def test_no_batch_is_lost_or_trained_twice(gpus: list[str], strategy: str, kind: str, steps_per_call: int) -> None:
    steps = {"steps_per_epoch": 10} if kind == "endless" else {}
    expected, trainer = small.initial_model(), tfpar.Trainer(small.build_model, SPLITTING[strategy](gpus), seed=0)
    wanted = expected.fit(DATA[kind](), epochs=2, verbose=0, **steps).history
    found = trainer.fit(DATA[kind](), epochs=2, verbose=0, steps_per_call=steps_per_call, **steps).history
    small.assert_same_history(found, wanted)
    small.assert_same_state(small.state(trainer.model), small.state(expected), 1e-5)


@each_strategy
def test_each_batch_enters_its_devices_while_the_step_before_runs(
    gpus: list[str], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched_steps, "suits", lambda devices: True)
    made = SPLITTING[strategy](gpus)
    model = make_model(small.build_model, made, 0)
    epoch_iterator, loop = Preparation(model, made).prepare_loop(small.data(), None, "train")
    assert isinstance(loop, launched_steps.LaunchedSteps)
    function = loop.launch(epoch_iterator.upcoming).get_concrete_function(*[epoch_iterator.upcoming] * 2)
    on_gpus = gpus[0].startswith("GPU")
    reading = read_placement(function, None if on_gpus else {name: f"GPU:{i}" for i, name in enumerate(gpus)}, "CPU:0")
    ahead = {one.target for one in reading.entering if re.fullmatch(r"AssignVariableOp[^/]*", one.consumer)}
    assert ahead == ({"GPU:1"} if strategy == "single device" else {"GPU:0", "GPU:1"})
    assert not [one for one in reading.entering if one.dtype == "float32"], "the inputs enter as a bundle"


def test_the_tensors_of_the_next_batch_are_in_the_memory_of_their_devices(gpus: list[str]) -> None:
    element = np.arange(6, dtype="float32"), np.arange(6, dtype="int64"), np.arange(6, dtype="int32")
    ahead = BatchesAhead(lambda element: StepBatch(element, [gpus[0], gpus[1], gpus[1]]))
    ahead.fill(tf.experimental.Optional.from_value(tuple(map(tf.constant, element))))
    with tf.device("CPU:0"):
        found = ahead.receive(tuple(map(tf.constant, element)))
    assert [one.device.rpartition("device:")[2] for one in found] == [gpus[0], gpus[1], "CPU:0"]
    for one, given in zip(found, element, strict=True):
        np.testing.assert_array_equal(one, given)


@each_strategy
def test_a_loss_that_is_not_finite_names_its_step_in_a_call_of_many(gpus: list[str], strategy: str) -> None:
    inputs, labels = parity_cases.inputs(73), parity_cases.labels(73)
    inputs[41] = np.nan  # the sixth batch
    trainer = tfpar.Trainer(small.build_model, SPLITTING[strategy](gpus), seed=0)
    with pytest.raises(FloatingPointError, match=r"is not at step 6 \(step 6 of epoch 1\)"):
        trainer.fit(inputs, labels, batch_size=8, shuffle=False, verbose=0, steps_per_call=100)


@each_strategy
def test_steps_compiled_by_xla_equal_those_of_one_device(gpus: list[str], strategy: str) -> None:
    def build() -> keras.Model:
        return parity_cases.classifier(jit_compile=True)()

    small.assert_trains_as_one_device(build, small.data, lambda: SPLITTING[strategy](gpus))


@each_strategy
def test_predictions_equal_those_of_keras_in_their_order(gpus: list[str], strategy: str) -> None:
    trainer = tfpar.Trainer(small.build_model, SPLITTING[strategy](gpus), seed=0)
    expected = small.initial_model().predict(parity_cases.inputs(41), batch_size=8, verbose=0)
    actual = trainer.predict(parity_cases.inputs(41), batch_size=8, verbose=0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@each_strategy
def test_a_run_resumes_on_the_cpu_from_a_checkpoint_of_gpus(gpus: list[str], strategy: str, tmp_path: Path) -> None:
    kept = tfpar.Checkpoints(tmp_path, every_seconds=0)
    trainer = tfpar.Trainer(small.build_model, SPLITTING[strategy](gpus), seed=0)
    trainer.fit(small.data(), epochs=1, verbose=0, checkpoints=kept)
    resumed = tfpar.Trainer(small.build_model, tfpar.SingleDevice("CPU:0"), seed=1)
    resumed.fit(small.data(), epochs=2, verbose=0, checkpoints=tfpar.Checkpoints(tmp_path))
    expected = small.initial_model()
    expected.fit(small.data(), epochs=2, verbose=0)
    small.assert_same_state(small.state(resumed.model), small.state(expected), 1e-5)


def test_weights_of_a_pipeline_are_on_the_devices_of_their_stages(gpus: list[str]) -> None:
    trainer = tfpar.Trainer(small.build_model, SPLITTING["pipeline"](gpus), seed=0)
    trainer.fit(small.data(), verbose=0)
    places = {tf.DeviceSpec.from_string(weight.value.device) for weight in trainer.model.trainable_weights}
    assert {f"{place.device_type}:{place.device_index}" for place in places} == {*gpus[:2]}


def test_a_step_is_predicted_and_its_actions_are_timed(gpus: list[str]) -> None:
    trainer = tfpar.Trainer(small.build_model, SPLITTING["pipeline"](gpus), seed=0)
    batch = trainer.build(small.data())
    prediction = trainer.strategy.predict_step_time(trainer.model, batch)
    assert prediction.planned.step_seconds > 0
    assert trainer.strategy.trace(trainer.model, batch).step_seconds > 0


def test_the_free_memory_of_gpus_is_known(gpus: list[str]) -> None:
    free = cluster.free_bytes(gpus[:2])
    assert free is None if gpus[0].startswith("CPU") else free is not None and free > 0

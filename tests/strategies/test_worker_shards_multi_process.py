"""`MultiWorker(shard="optimizer")`: the unsharded result, and each slot on one worker alone."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import objective_cases, parity_cases, shard_cases, small, workers
from tests.support.shard_cases import OPTIMIZERS, REFUSED, classifier
from tfpar._compat.optimizers import keras_sharded_slots
from tfpar._compat.variables.sharded_memory import is_remote
from tfpar.engines.workers.collectives import Group
from tfpar.reduction import objective

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]

CASES = parity_cases.CASES | objective_cases.CASES
SHARD = (None, "optimizer")
LAYOUTS: dict[str, Callable[[Any], tfpar.Strategy]] = {
    "one device": lambda shard: tfpar.MultiWorker(["CPU:0"], shard=shard),
    "two devices": lambda shard: tfpar.MultiWorker(["CPU:0", "CPU:1"], shard=shard),
    "two devices, small messages": lambda shard: tfpar.MultiWorker(
        ["CPU:0", "CPU:1"], pack_bytes=1024, compression="bfloat16", shard=shard
    ),
    "stages": lambda shard: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), shard=shard),
}


@functools.cache
def strategy(layout: str, shard: str | None) -> tfpar.Strategy:
    return LAYOUTS[layout](shard)


def of_optimizer(name: str, **compiled: Any) -> keras.Model:
    model = classifier(OPTIMIZERS[name])()
    if compiled:
        model.compile(model.optimizer, model.loss, **compiled)
    return model


def averaging() -> keras.Model:
    return classifier(lambda: keras.optimizers.Adam(0.01, use_ema=True))()


def swaps() -> dict[str, Any]:
    return {"callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)], "validation_data": small.data()}


# A layout, a model, data where they are not those of most tests, and settings of `fit`.
TRAININGS: dict[str, tuple[Any, ...]] = {
    **{name: ("one device", functools.partial(of_optimizer, name)) for name in OPTIMIZERS},
    **{
        name: ("one device", CASES[name].build, CASES[name].data, functools.partial(dict, CASES[name].fit))
        for name in shard_cases.CASES_HERE
    },
    "a replica without weights": ("one device", shard_cases.one_weight),
    "swapped averages": ("one device", averaging, small.data, swaps),
    "two devices": ("two devices", functools.partial(of_optimizer, "norm, average")),
    "stages": ("stages", functools.partial(of_optimizer, "accumulation, norm")),
    "stages, averages": ("stages", functools.partial(of_optimizer, "norm, average")),
    "XLA": ("one device", functools.partial(of_optimizer, "norm, average", jit_compile=True)),
    "XLA, small messages": (
        "two devices, small messages",
        functools.partial(of_optimizer, "norm, average", jit_compile=True),
    ),
}
IN_CI = ("embedding, sparse gradients",)


def whole_state(trainer: tfpar.Trainer) -> list[np.ndarray] | None:
    """Return all variables, those of the optimizer from all workers, on the chief."""
    with trainer.strategy.engine.whole_state(trainer.model):
        return small.state(trainer.model) if trainer.strategy.is_chief else None


def divided(model: keras.Model) -> tuple[int, int]:
    """Return the number of slots of which one worker alone holds each, and of those that another worker holds."""
    variables = [variable for optimizer, _ in objective.updates_of(model) for variable in optimizer.variables]
    holders = [keras_sharded_slots.holder_of(variable) for variable in variables]
    return sum(holder is not None for holder in holders), sum(map(is_remote, variables))


def copies(model: keras.Model) -> list[list[np.ndarray]]:
    """Return the weights on each local replica."""
    return [[memory.numpy() for memory in keras_sharded_slots.memories(weight)] for weight in model.weights]


def train(name: str, shard: str | None) -> Any:
    layout, build, *more = TRAININGS[name]
    data, settings = (*more, *(small.data, dict)[len(more) :])
    trainer = tfpar.Trainer(build, strategy(layout, shard), seed=0)
    history = trainer.fit(data(), epochs=2, verbose=0, **settings()).history
    return history, copies(trainer.model), whole_state(trainer), divided(trainer.model)


def move(shard: str | None) -> Any:
    """Train a model in each process alone, of which the chief's state counts, then on the workers, in two calls."""
    keras.utils.set_random_seed(workers.rank())
    model = of_optimizer("own shapes")
    model.fit(small.data(), verbose=0)
    trainer = tfpar.Trainer(model, strategy("one device", shard))
    losses = [trainer.fit(small.data(), verbose=0).history["loss"] for _ in range(2)]
    return {"loss": losses}, copies(model), whole_state(trainer), divided(model)


def assert_same_training(job: workers.Job, function: Callable[..., Any], *arguments: str) -> None:
    """Assert the same history and state without and with shards, divided slots, and equal weights on all replicas."""
    of_whole, of_shards = (job.run(function, *arguments, shard) for shard in SHARD)
    history, _, state, without = of_whole[0]
    assert all(result[0] == of_shards[0][0] for result in of_shards)
    small.assert_same_history(of_shards[0][0], history)
    small.assert_same_state(of_shards[0][2], state, 1e-5)
    assert without == (0, 0)
    num_divided = of_shards[0][3][0]
    assert sum(slots - elsewhere for *_, (slots, elsewhere) in of_shards) == num_divided
    assert num_divided or len(state) <= 8, "without slots: six weights, the step and the learning rate"
    for results in (of_whole, of_shards):
        for memories in zip(*(result[1] for result in results), strict=True):
            for memory in itertools.chain(*memories):
                np.testing.assert_array_equal(memory, memories[0][0])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.extended) for name in TRAININGS]
)
def test_weights_state_and_logs_are_those_of_unsharded_workers(job: workers.Job, name: str) -> None:
    assert_same_training(job, train, name)


@pytest.mark.extended
def test_a_trained_model_trains_on(job: workers.Job) -> None:
    assert_same_training(job, move)


@pytest.mark.extended
@pytest.mark.parametrize("name", shard_cases.CASES_HERE[::3])
def test_three_workers_train_as_without_shards(jobs: workers.Pool, name: str) -> None:
    assert_same_training(jobs.job(num_workers=3), train, name)


def sent_bytes(layout: str, shard: str | None) -> float:
    """Return the bytes of floats that this worker sends in the steps that a training traces."""
    total = 0.0

    def counted(original: Any, times: Any) -> Any:
        def send(group: Group, tensor: tf.Tensor, *others: Any, **options: Any) -> tf.Tensor:
            nonlocal total
            if not tf.executing_eagerly() and tensor.dtype == tf.float32:
                total += times(group.num_members) * tensor.shape.num_elements() * tensor.dtype.size
            return original(group, tensor, *others, **options)

        return send

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((32,)), *(keras.layers.Dense(32) for _ in range(8))])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model

    with (
        mock.patch.object(Group, "_gather", counted(Group._gather, lambda members: members - 1)),
        mock.patch.object(Group, "_reduce", counted(Group._reduce, lambda members: 2 * (members - 1) / members)),
    ):
        examples = np.zeros((256, 32), "float32")  # so many that no products of small factors are sent
        trainer = tfpar.Trainer(build, strategy(layout, shard), seed=0)
        trainer.fit(examples, examples, batch_size=128, verbose=0)
    return total


@pytest.mark.parametrize(
    "layout",
    ["one device", *(pytest.param(layout, marks=pytest.mark.extended) for layout in ("two devices", "stages"))],
)
def test_replicas_and_stages_send_the_new_weights_in_addition_to_the_gradients(job: workers.Job, layout: str) -> None:
    for without, of_shards in zip(*(job.run(sent_bytes, layout, shard) for shard in SHARD), strict=True):
        assert without > 4 * 8 * 32 * 32, "all gradients"
        assert of_shards < 1.6 * without, "half of the bytes of an all-reduce"


def save(folder: Path) -> Any:
    """Save in all ways; return the numbers of the slots here, the preview's bytes, the state, and results."""
    used = strategy("one device", "optimizer")
    trainer = tfpar.Trainer(functools.partial(of_optimizer, "norm, average"), used, seed=0)
    preview = trainer.preview(small.data())
    callbacks = [keras.callbacks.ModelCheckpoint(folder / "epoch.keras"), tfpar.ReplicaCheck()]
    trainer.fit(small.data(), verbose=0, callbacks=callbacks)
    trainer.save(folder / "model.keras")
    held = [number for number, slot in enumerate(trainer.model.optimizer.variables) if not is_remote(slot)]
    state_bytes = [row.state_bytes for row in preview.rows]
    results = trainer.evaluate(small.data(), verbose=0), trainer.predict(small.data(), verbose=0)
    return held, state_bytes, whole_state(trainer), results, used.describe()


def test_each_worker_holds_its_slots_alone_and_the_chief_saves_all(job: workers.Job, tmp_path: Path) -> None:
    (chiefs, of_chief, state, results, _), (others, of_other, none, of_others, described) = job.run(save, tmp_path)
    assert none is None
    assert results[0] == of_others[0]
    np.testing.assert_array_equal(results[1], of_others[1])
    assert described.startswith("MultiWorker over 2 workers, 2 replicas, optimizer state sharded; this is worker 1")
    trained = keras.models.load_model(tmp_path / "model.keras")
    of_epoch = keras.models.load_model(tmp_path / "epoch.keras")
    small.assert_same_state(small.state(trained), state)
    small.assert_same_state(small.state(of_epoch)[6:], state[6:])  # the weights of `epoch` are not averages yet
    slots = {number for number, slot in enumerate(trained.optimizer.variables) if len(slot.shape)}
    assert {*chiefs} & {*others} & slots == set()
    assert {*chiefs, *others} >= slots
    num_bytes = 4 * trained.count_params()
    shared = 8 + 4  # iterations and learning rate
    assert sum(of_chief + of_other) == 4 * num_bytes + 3 * num_bytes + 2 * shared
    assert max(of_chief + of_other) < 4 * num_bytes


def read_alone() -> list[str]:
    used = strategy("one device", "optimizer")
    trainer = tfpar.Trainer(functools.partial(of_optimizer, "norm, average"), used, seed=0)
    trainer.build(small.data())
    slot = next(one for one in trainer.model.optimizer.variables if is_remote(one))
    errors = []
    for attempt in (slot.numpy, lambda: slot.assign(np.zeros(slot.shape))):
        with pytest.raises(RuntimeError) as raised:
            attempt()
        errors.append(str(raised.value))
    used_folder = trainer.strategy.engine.whole_state(trainer.model, Path("/nowhere"))
    with pytest.raises((OSError, ValueError), match=r".") as missing, used_folder:
        pass
    return [*errors, str(missing.value)]


def test_a_slot_of_another_worker_is_neither_read_nor_changed(job: workers.Job) -> None:
    for rank, (read, changed, gathered) in enumerate(job.run(read_alone)):
        assert re.match(f"Worker {1 - rank} alone holds 'adam_w.*, and this worker cannot read it. Save with", read)
        assert "this worker cannot change it" in changed
        assert "No such file or directory: '/nowhere" in gathered


def refusal(build: Callable[[], keras.Model], *callbacks: keras.callbacks.Callback, seed: int = 0) -> str:
    """Return the error of `fit`; empty without one."""
    trainer = tfpar.Trainer(build, strategy("one device", "optimizer"), seed=seed)
    try:
        trainer.fit(small.data(), verbose=0, callbacks=[*callbacks])
    except ValueError as error:
        return str(error)
    return ""


def refuse(sentence: str, folder: Path) -> str:
    build, *callbacks = REFUSED[sentence]
    return refusal(build, *(callback(folder) for callback in callbacks))


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_a_worker_cannot_do_alone_is_refused_before_the_first_step(
    job: workers.Job, sentence: str, tmp_path: Path
) -> None:
    for message in job.run(refuse, sentence, tmp_path):
        assert re.search(sentence, message)


def freeze_on_one_worker() -> str:
    def build() -> keras.Model:
        model = classifier(keras.optimizers.SGD)()
        model.layers[0].trainable = workers.rank() == 0
        return model

    return refusal(build)


def test_workers_with_different_owners_are_refused(job: workers.Job) -> None:
    for message in job.run(freeze_on_one_worker):
        assert message.startswith("All workers must be equal, and worker 1")


def begin_with_other_weights() -> tuple[str, str]:
    """Begin with other weights on each worker; the chief's count."""
    of_state = refusal(functools.partial(of_optimizer, "begins with the weights"), seed=workers.rank())
    return of_state, refusal(classifier(keras.optimizers.Adam), seed=workers.rank())


def test_state_that_begins_with_weights_needs_workers_with_the_same(job: workers.Job) -> None:
    for refused, accepted in job.run(begin_with_other_weights):
        assert re.search(
            "differs from the chief in the initial weights, with which the optimizer's state begins", refused
        )
        assert accepted == ""

"""The program of a worker for test_worker_shards_multi_process.py: trainings with and without shards."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tests.support import checkpoint_matrix as matrix
from tests.support import objective_cases, parity_cases, shard_cases, small, workers
from tests.support.shard_cases import (
    ALL_TRAININGS,
    CASES_HERE,
    OPTIMIZERS,
    OVER_WORKERS,
    STAGED,
    TRAININGS,
    classifier,
)
from tfpar._compat import keras_divided_state, tf_replica_memory
from tfpar.reduction import objective
from tfpar.strategies.multi_worker.collectives import Group

FOLDER, RANK = workers.place()
ONE = ["CPU:0"]
SHARD = (None, "optimizer")
CASES = parity_cases.CASES | objective_cases.CASES


@functools.cache
def strategy(shard: Any, num_devices: int = 1) -> tfpar.MultiWorker:
    return tfpar.MultiWorker(["CPU:0", "CPU:1"][:num_devices], shard=shard)


@functools.cache
def of_stages(shard: Any) -> tfpar.Hybrid:
    return tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), shard=shard)


def whole_state(trainer: tfpar.Trainer) -> list[np.ndarray] | None:
    """Return all variables, those of the optimizer from all workers, on the chief."""
    with trainer.strategy.whole_state(trainer.model):
        if not trainer.strategy.is_chief:
            return None
        return small.state(trainer.model)


def trained(build: Any, data: Any, shard: Any, num_devices: int = 1, **fit: Any) -> Any:
    used = shard if isinstance(shard, tfpar.Strategy) else strategy(shard, num_devices)
    trainer = tfpar.Trainer(build, used, seed=0)
    history = trainer.fit(data, **{"epochs": 2, "verbose": 0, **fit}).history
    return history, copies(trainer.model), whole_state(trainer), divided(trainer.model)


def divided(model: keras.Model) -> tuple[int, int]:
    """Return the number of slots of which one worker alone holds each, and of those that another worker holds."""
    variables = [variable for optimizer, _ in objective.updates_of(model) for variable in optimizer.variables]
    return sum(map(keras_divided_state.is_divided, variables)), sum(map(keras_divided_state.is_elsewhere, variables))


def copies(model: keras.Model) -> list[list[np.ndarray]]:
    """Return the weights on each local replica."""
    return [[memory.numpy() for memory in tf_replica_memory.memories(weight)] for weight in model.weights]


class Functions:
    """The functions of the program: all methods without a leading underscore, in this order."""

    def optimizers(self) -> Any:
        return {
            name: [trained(classifier(OPTIMIZERS[name]), small.data(), shard) for shard in SHARD]
            for name in OVER_WORKERS
        }

    def one_replica_has_nothing(self) -> Any:
        """One weight: worker 1 updates none, and counts the steps."""
        return [trained(shard_cases.one_weight, small.data(), shard) for shard in SHARD]

    def cases(self) -> Any:
        return {
            name: [trained(CASES[name].build, CASES[name].data(), shard, **CASES[name].fit) for shard in SHARD]
            for name in CASES_HERE[::3]
        }

    def two_devices(self) -> Any:
        build = classifier(OPTIMIZERS["norm, average"])
        return [trained(build, small.data(), shard, 2) for shard in SHARD]

    def compiled(self) -> Any:
        """Train with XLA: on one device of each worker, and on two with small messages."""

        def build() -> keras.Model:
            model = classifier(OPTIMIZERS["norm, average"])()
            model.compile(model.optimizer, model.loss, jit_compile=True)
            return model

        small_packs = functools.partial(tfpar.MultiWorker, ["CPU:0", "CPU:1"], pack_bytes=1024, compression="bfloat16")
        used = [(strategy(shard), small_packs(shard=shard)) for shard in SHARD]
        return [[trained(build, small.data(), one) for one in layouts] for layouts in zip(*used, strict=True)]

    def stages(self) -> Any:
        """Train in two stages on each worker."""
        return {
            name: [trained(classifier(OPTIMIZERS[name]), small.data(), of_stages(shard)) for shard in SHARD]
            for name in STAGED
        }

    def sent(self) -> Any:
        """Return the bytes that a step of two replicas, of four and of stages sends without and with shards."""
        layouts = (strategy, functools.partial(strategy, num_devices=2), of_stages)
        return [[sent_bytes(used(shard)) for shard in SHARD] for used in layouts]

    def resumed(self) -> Any:
        """Begin a run under one layout, and end it under the other."""
        layouts = (of_stages("optimizer"), strategy("optimizer"))
        ended = []
        for number, (first, second) in enumerate((layouts, layouts[::-1])):
            folder = FOLDER / f"checkpoints-{number}"
            matrix.begin(first, folder)
            ended.append(matrix.end(second, folder))
        return ended

    def swapped_averages(self) -> Any:
        build = classifier(lambda: keras.optimizers.Adam(0.01, use_ema=True))
        found = []
        for shard in SHARD:
            callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
            found.append(trained(build, small.data(), shard, callbacks=callbacks, validation_data=small.data()))
        return found

    def moved(self) -> Any:
        """Train a model in each process alone, of which the chief's state counts, then on the workers, in two calls."""
        found = []
        for shard in SHARD:
            keras.utils.set_random_seed(RANK)
            model = classifier(OPTIMIZERS["own shapes"])()
            model.fit(small.data(), verbose=0)
            trainer = tfpar.Trainer(model, strategy(shard))
            first = trainer.fit(small.data(), verbose=0).history
            second = trainer.fit(small.data(), verbose=0).history
            history = {"loss": first["loss"] + second["loss"]}
            found.append((history, copies(model), whole_state(trainer), divided(model)))
        return found

    def saved(self) -> Any:
        """Save in all ways; return the numbers of the slots here, the preview's bytes, the state, and results."""
        trainer = tfpar.Trainer(classifier(OPTIMIZERS["norm, average"]), strategy("optimizer"), seed=0)
        preview = trainer.preview(small.data())
        path = FOLDER / "epoch.keras"
        callbacks = [keras.callbacks.ModelCheckpoint(path), tfpar.ReplicaCheck()]
        trainer.fit(small.data(), verbose=0, callbacks=callbacks)
        trainer.save(FOLDER / "model.keras")
        held = [number for number, slot in enumerate(trainer.model.optimizer.variables) if slot._value is not None]
        state_bytes = [row.state_bytes for row in preview.rows]
        results = trainer.evaluate(small.data(), verbose=0), trainer.predict(small.data(), verbose=0)
        return held, state_bytes, whole_state(trainer), results, strategy("optimizer").describe()

    def reads_alone(self) -> Any:
        trainer = tfpar.Trainer(classifier(OPTIMIZERS["norm, average"]), strategy("optimizer"), seed=0)
        trainer.build(small.data())
        slot = next(one for one in trainer.model.optimizer.variables if one._value is None)
        found = []
        for attempt in (slot.numpy, lambda: slot.assign(np.zeros(slot.shape))):
            try:
                attempt()
            except RuntimeError as error:
                found.append(str(error))
        try:
            with trainer.strategy.whole_state(trainer.model, Path("/nowhere")):
                found.append("")
        except (OSError, ValueError) as error:
            found.append(str(error))
        return found

    def refused(self) -> Any:
        return {name: refusal(*arguments) for name, arguments in shard_cases.REFUSED.items()}

    def frozen_on_one_worker(self) -> Any:
        def build() -> keras.Model:
            model = classifier(keras.optimizers.SGD)()
            model.layers[0].trainable = RANK == 0
            return model

        return refusal(build)

    def begins_with_other_weights(self) -> Any:
        """Begin with other weights on each worker; the chief's count."""
        of_state = refusal(classifier(OPTIMIZERS["begins with the weights"]), seed=RANK)
        return of_state, refusal(classifier(keras.optimizers.Adam), seed=RANK)


def sent_bytes(used: tfpar.Strategy) -> float:
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
        tfpar.Trainer(build, used, seed=0).fit(examples, examples, batch_size=128, verbose=0)
    return total


def refusal(build: Any, *callbacks: Any, seed: int = 0) -> str:
    trainer = tfpar.Trainer(build, strategy("optimizer"), seed=seed)
    try:
        trainer.fit(small.data(), verbose=0, callbacks=[callback(FOLDER) for callback in callbacks])
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    strategy(None)  # before TensorFlow starts
    functions = Functions()
    every = [name for name in vars(Functions) if not name.startswith("_")]
    names = sys.argv[3:] or [name for name in every if name not in ALL_TRAININGS or name in TRAININGS]
    workers.run_all({name: getattr(functions, name) for name in names})


if __name__ == "__main__":
    tfpar.use_logical_cpus(2)
    main()

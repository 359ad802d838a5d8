"""Layouts of a run, and the run that begins under one and ends under another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases
from tests.support.extent import sampled
from tfpar.layout import Layout
from tfpar.strategies import of_layout

EPOCHS, STEPS_PER_EPOCH, INTERRUPTED_AT = 2, 10, 13
# Layouts with the balance of their stages; the workers of a job have two devices, of which replicas use the first.
IN_ONE_PROCESS: dict[str, tuple[Layout, list[int]]] = {
    "one device": (Layout(), []),
    "mirrored over 2": (Layout(2), []),
    "state of replicas": (Layout(2, shard="optimizer"), []),
    "blocks over 3": (Layout(3, shard="weights"), []),
    "pipeline of 2": (Layout(1, 2, 3), [1, 3]),
    "pipeline of 4": (Layout(1, 4, 2, "zero_bubble"), [1, 1, 1, 1]),
    "tensor parallel over 3": (Layout(num_shards=3), []),
    "state of replicas of shards": (Layout(2, num_shards=2, shard="optimizer"), []),
    "stages of shards": (Layout(1, 2, 3, num_shards=2), [2, 2]),
    "hybrid of 2 x 2": (Layout(2, 2, 2, "gpipe"), [2, 2]),
}
OVER_WORKERS: dict[str, tuple[Layout, list[int]]] = {
    "two workers": (Layout(2, num_workers=2), []),
    "shards over two workers": (Layout(2, shard="optimizer", num_workers=2), []),
    "blocks over two workers": (Layout(2, shard="weights", num_workers=2), []),
    "hybrid over two workers": (Layout(2, 2, 2, num_workers=2), [3, 1]),
    "state of stages over two workers": (Layout(2, 2, 2, shard="optimizer", num_workers=2), [3, 1]),
    "state of shards over two workers": (Layout(2, num_shards=2, shard="optimizer", num_workers=2), []),
    "pipeline over two workers": (Layout(1, 2, 3, num_workers=2, across_workers=True), [1, 3]),
    "grid over two workers": (Layout(2, 2, 2, num_workers=2, across_workers=True), [2, 2]),
}
# The other process runs no function.
DRIVEN_BY_THE_FIRST = ("pipeline over two workers", "grid over two workers", "blocks over two workers")
LAYOUTS = sampled(
    (*IN_ONE_PROCESS, *OVER_WORKERS),
    of_ci=(
        *("one device", "state of replicas", "blocks over 3", "pipeline of 4"),
        *("tensor parallel over 3", "hybrid of 2 x 2", "shards over two workers", "state of stages over two workers"),
    ),
)
Ended = tuple[dict[str, list[float]], list[np.ndarray]]


def strategy(name: str) -> tfpar.Strategy:
    """Return the strategy of a layout by its name, in the process that trains under it."""
    layout, balance = (IN_ONE_PROCESS | OVER_WORKERS)[name]
    if balance:
        return of_layout(layout, balance=balance)
    return of_layout(layout, [f"CPU:{number}" for number in range(max(2, layout.devices_per_worker))])


def pairs() -> tuple[tuple[str, str], ...]:
    """Return the layouts under which a run begins and ends.

    In CI a run begins under each of some layouts and one ends under each, several from one process to two or back.
    """
    opposite = (*LAYOUTS[len(LAYOUTS) // 2 :], *LAYOUTS[: len(LAYOUTS) // 2])
    return sampled(itertools.product(LAYOUTS, LAYOUTS), of_ci=zip(LAYOUTS, opposite, strict=True))


def build() -> keras.Model:
    """A model of four layers, with slots, a moving average, accumulated gradients, and random state."""
    layers = [keras.layers.Dense(width, "tanh") for width in (6, 5, 4)]
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *layers, keras.layers.Dense(3)])
    optimizer = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)])
    return model


def data() -> tf.data.Dataset:
    """Ten batches, the last of 1 example, in another order every epoch."""
    arrays = parity_cases.inputs(73), parity_cases.labels(73)
    return tf.data.Dataset.from_tensor_slices(arrays).shuffle(73, seed=3, reshuffle_each_iteration=True).batch(8)


class InterruptAt(keras.callbacks.Callback):
    """Interrupts a trainer after some number of batches."""

    single_batches = True

    def __init__(self, trainer: tfpar.Trainer) -> None:
        super().__init__()
        self._trainer, self._seen = trainer, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._seen += 1
        if self._seen == INTERRUPTED_AT:
            self._trainer.interrupt()


def begin(strategy: tfpar.Strategy, folder: Path) -> None:
    """Train into the second epoch, and leave a checkpoint in a folder."""
    trainer = tfpar.Trainer(build, strategy, seed=0)
    callbacks = [InterruptAt(trainer)] if strategy.rank == strategy.num_workers - 1 else []
    checkpoints = tfpar.Checkpoints(folder, every_seconds=1000)
    trainer.fit(data(), epochs=EPOCHS, verbose=0, checkpoints=checkpoints, callbacks=callbacks)


def end(strategy: tfpar.Strategy, folder: Path) -> Ended:
    """Train to the end of the second epoch, from the checkpoint of a folder if there is one."""
    trainer = tfpar.Trainer(build, strategy, seed=0)
    checkpoints = tfpar.Checkpoints(folder, every_seconds=1000)
    history = trainer.fit(data(), epochs=EPOCHS, verbose=0, checkpoints=checkpoints).history
    with strategy.engine.whole_state(trainer.model):
        has_all = strategy.is_chief or not strategy.engine.divides_state
        return history, cases.state(trainer.model) if has_all else trainer.model.get_weights()

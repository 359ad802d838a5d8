"""Models and optimizers for the tests of sharded optimizer state, in one process and in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tests.support import parity_cases


def classifier(optimizer: Callable[[], Any]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(12, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
        return model

    return build


OPTIMIZERS = {
    "norm, average": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, 0.9, clipnorm=0.1, gradient_accumulation_steps=2),
    "accumulation, norm": lambda: keras.optimizers.Nadam(0.01, global_clipnorm=0.2, gradient_accumulation_steps=2),
    "own shapes": lambda: keras.optimizers.Adafactor(0.01),
    "matrices": lambda: keras.optimizers.Muon(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01), 1024.0, 3),
    "begins with the weights": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "no slots": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
}

# Of the parity table: rows of lookups, losses of layers, several optimizers.
CASES_HERE = (
    "embedding, sparse gradients",
    "rows looked up in several ways",
    "add_loss",
    "GAN, clipped and accumulated",
)


def one_weight() -> keras.Model:
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(3, use_bias=False)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Nadam(0.01, global_clipnorm=0.1), loss)
    return model


class NormsOfAll(keras.optimizers.SGD):
    """An optimizer that takes all gradients at once."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(gradient)) for gradient in grads))
        super().apply([gradient / norm for gradient in grads], trainable_variables)


class CountsUpdates(keras.optimizers.SGD):
    """An optimizer with state of all weights."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.count.assign_add(1.0)
        super().update_step(gradient, variable, learning_rate)


def of_several() -> Any:
    return keras.optimizers.MultiOptimizer(lambda weight: keras.optimizers.SGD(0.1))


# Each weight's update depends on all weights: refused where a process has a part of them, trained in one process.
OF_ALL_WEIGHTS: dict[str, Callable[[], Any]] = {
    "norm of all gradients": lambda: NormsOfAll(0.1, 0.9),
    "state of all weights": lambda: CountsUpdates(0.1, 0.9),
    "several optimizers": of_several,
}
_plain = classifier(keras.optimizers.SGD)
# A model function, and functions from a folder to a callback.
REFUSED: dict[str, tuple[Any, ...]] = {
    "apply of NormsOfAll takes all weights at once": (classifier(NormsOfAll),),
    "apply of MultiOptimizer takes all weights at once": (classifier(of_several),),
    "CountsUpdates has state of all weights, '.*/count'": (classifier(CountsUpdates),),
    "BackupAndRestore restores on the chief": (_plain, lambda folder: keras.callbacks.BackupAndRestore(folder)),
    r"received ModelCheckpoint\(save_freq=3\)": (
        _plain,
        lambda folder: keras.callbacks.ModelCheckpoint(folder / "batch.keras", save_freq=3),
    ),
    r"received ModelCheckpoint with SwapEMAWeights\(swap_on_epoch=True\)": (
        _plain,
        lambda folder: keras.callbacks.ModelCheckpoint(folder / "batch.keras"),
        lambda folder: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ),
}

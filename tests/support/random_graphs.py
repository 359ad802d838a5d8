"""Random Functional models, trained on pipelines and on replicas of them, and compared with Keras' own `fit`.

`python -m tests.support.random_graphs 200` trains as many models, `… 50 1000` those of the seeds from 1000.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar
from tests.properties.test_parity import Result, computing_in, differences

NUM_EXAMPLES, BATCH = 23, 8


class Graph:
    """A random model with its data; the same for a seed.

    Args:
        seed: Any number.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        drawn = random.Random(seed)
        self.num_inputs, self.num_outputs = drawn.randint(1, 3), drawn.randint(1, 3)
        self.takes_tokens = drawn.random() < 0.4
        self.num_layers = drawn.randint(4, 14)

    def build(self) -> keras.Model:
        """Return the compiled model."""
        drawn = random.Random(self._seed + 1)
        inputs = [keras.Input((5,), name=f"features_{number}") for number in range(self.num_inputs)]
        values: list[Any] = [layers.Dense(drawn.choice((4, 6)), "tanh")(one) for one in inputs]
        if self.takes_tokens:
            inputs.append(keras.Input((4,), dtype="int32", name="tokens"))
            embedded = layers.Embedding(7, 6, mask_zero=drawn.random() < 0.5)(inputs[-1])
            mixed = layers.LSTM(6)(embedded) if drawn.random() < 0.5 else layers.GlobalAveragePooling1D()(embedded)
            values.append(mixed)
        shared = layers.Dense(6, "sigmoid")
        for _ in range(self.num_layers):
            values.append(self._next(drawn, values, shared))
        unused = [value for value in values if not value._keras_history.operation._outbound_nodes]
        ends = drawn.sample(values, self.num_outputs)
        joined = layers.Concatenate()([*unused, *ends]) if len(unused) + len(ends) > 1 else ends[0]
        outputs = [layers.Dense(2, name="joined")(joined)]
        outputs += [layers.Dense(2, name=f"end_{number}")(one) for number, one in enumerate(ends[1:])]
        model = keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
        optimizer = drawn.choice(
            (
                lambda: keras.optimizers.Adam(0.01),
                lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
                lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
                lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
            )
        )()
        model.compile(optimizer, drawn.choice(("mse", "mae", "huber")))
        return model

    def _next(self, drawn: random.Random, values: list[Any], shared: keras.Layer) -> Any:
        one = drawn.choice(values)
        alike = [value for value in values if value.shape == one.shape]
        kind = drawn.randrange(9)
        if kind == 0 and len(alike) > 1:
            return layers.Add()(drawn.sample(alike, 2))
        if kind == 1 and len(alike) > 1:
            return layers.Multiply()(drawn.sample(alike, 2))
        if kind == 2:
            return layers.Concatenate()([one, drawn.choice(values)])
        if kind == 3:
            return layers.LayerNormalization()(one)
        if kind == 4 and one.shape[-1] == 6:
            return shared(one)
        if kind == 5:
            return keras.ops.tanh(one) * 0.5 + one
        if kind == 6:
            return layers.Dense(drawn.choice((4, 6)), "gelu", kernel_regularizer="l2")(one)
        if kind == 7:
            return layers.ActivityRegularization(l2=1e-3)(one)
        return layers.Dense(drawn.choice((4, 6)), drawn.choice(("relu", "elu", None)))(one)

    def data(self) -> tf.data.Dataset:
        """Return two batches and a shorter one, on every third graph with sample weights."""
        drawn = np.random.default_rng(self._seed)
        inputs = [drawn.normal(size=(NUM_EXAMPLES, 5)) for _ in range(self.num_inputs)]
        if self.takes_tokens:
            inputs.append(drawn.integers(0, 7, (NUM_EXAMPLES, 4)).astype("int32"))
        targets = [drawn.normal(size=(NUM_EXAMPLES, 2)) for _ in range(self.num_outputs)]
        packed = (
            tuple(inputs) if len(inputs) > 1 else inputs[0],
            tuple(targets) if len(targets) > 1 else targets[0],
        )
        weights = (drawn.uniform(size=NUM_EXAMPLES),) if self._seed % 3 == 0 and self.num_outputs == 1 else ()
        return tf.data.Dataset.from_tensor_slices((*packed, *weights)).batch(BATCH)

    def strategy(self) -> tfpar.Strategy:
        """Return a pipeline or replicas of one, with any schedule, balance and number of micro-batches."""
        drawn = random.Random(self._seed + 2)
        num_stages, num_replicas = drawn.choice(((2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (1, 4)))
        schedule = drawn.choice(("gpipe", "1f1b", "zero_bubble"))
        balance = drawn.choice(("parameters", "flops", "memory"))
        pipeline = tfpar.Pipeline(num_stages, drawn.randint(1, 6), schedule, balance, recompute=drawn.random() < 0.3)
        return tfpar.Hybrid(pipeline, num_replicas) if num_replicas > 1 else pipeline


def _train(fit: Callable[..., Any], model: keras.Model, graph: Graph) -> Result:
    history = fit(graph.data(), epochs=2, verbose=0, validation_data=graph.data()).history
    return history, [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def differences_of(seed: int) -> Iterator[str]:
    """Train the graph of a seed, and yield the differences from Keras' own `fit`."""
    graph = Graph(seed)
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = graph.build()
        expected = _train(model.fit, model, graph)
        trainer = tfpar.Trainer(graph.build, graph.strategy(), seed=0)
        yield from differences(_train(trainer.fit, trainer.model, graph), expected, "float64")


def main(number: str, first: str = "0") -> None:
    """Train models and print those that differ."""
    tfpar.use_logical_cpus(4)
    for seed in range(int(first), int(first) + int(number)):
        found = list(differences_of(seed))
        print(f"{seed} {Graph(seed).strategy().describe()}: {'; '.join(found) or 'equal'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

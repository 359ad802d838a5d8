"""The program of a worker for test_replicas_multi_process.py: models that need more than a sum of dense gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfpar
from tests.pipeline.graph.test_batch_dependence_in_inference import in_inference
from tests.reduction.test_indexed_slices import embedding, tokens
from tests.reduction.test_losses_in_call import pairs, weighted, with_endpoint
from tests.reduction.test_scalar_losses import contrast, mean, mean_accuracy, total, two_outputs, with_loss
from tests.strategies.test_batch_dependence_replicas import BATCH_DEPENDENT, Gathers, with_layer
from tests.support import category_cases, objective_cases, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.extent import sampled
from tfpar import config

ALL_TRAINED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "centred": (BATCH_DEPENDENT["centred"], small.data),
    "own call": (BATCH_DEPENDENT["own"], small.data),
    "gathers by itself": (with_layer(lambda x: Gathers()(x)), cases.ALL_SHARDED["by example, uneven"]),
    "loss in a layer": (with_endpoint(weighted(), loss=None), pairs),
    "rows": (parity_cases.lookups, lambda: parity_cases._tokens(11)),
    "rows of bfloat16": (embedding("bfloat16"), tokens),
    "rows of float16 scaled": (embedding("mixed_float16"), tokens),
    "scalar loss and metric": (with_loss(mean, metrics=[mean_accuracy]), small.data),
    "scalar loss, sharded": (with_loss(mean), cases.ALL_SHARDED["by example, uneven"]),
    "scalar sum, chief without data": (with_loss(total), cases.ALL_SHARDED["by file, worker 0 has nothing"]),
    "scalar loss that gathers": (with_loss(contrast), small.data),
    "scalars of two outputs": (two_outputs, parity_cases.two_outputs_data(as_dict=True)),
    "contrastive": (objective_cases.contrastive, objective_cases.views),
}
TRAINED = {name: ALL_TRAINED[name] for name in sampled(ALL_TRAINED, of_ci=[*ALL_TRAINED][::2])}


def train(strategy: tfpar.Strategy, build: Callable[[], Any], dataset: Callable[[], Any]) -> tuple[Any, Any]:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    return trainer.fit(dataset(), epochs=2, verbose=0).history, cases.state(trainer.model)


def predict(strategy: tfpar.Strategy) -> Any:
    return tfpar.Trainer(BATCH_DEPENDENT["similar"], strategy, seed=0).predict(parity_cases.inputs(19), 9, verbose=0)


def evaluated(strategy: tfpar.Strategy) -> Any:
    """Fit with validation data, and predict, with a layer that is batch-dependent in inference only."""
    trainer = tfpar.Trainer(in_inference, strategy, seed=0)
    history = trainer.fit(small.data(), validation_data=small.data(), verbose=0).history
    return history, trainer.predict(parity_cases.inputs(19), 9, verbose=0)


def refused(strategy: tfpar.Strategy) -> None:
    train(strategy, BATCH_DEPENDENT["mean"], small.data)


def only_of_worker_1() -> tf.data.Dataset:
    """Return global batches with equal examples on the chief, where a maximum over the batch looks like a mean."""
    features = np.ones((8, 4), "float32")
    features[4:] += np.arange(16).reshape(4, 4)
    return tf.data.Dataset.from_tensor_slices((features, np.zeros((8, 1), "float32"))).batch(8)


def largest(targets: Any, outputs: Any) -> Any:
    """A maximum on worker 1 alone: the chief has a mean, which it does not refuse."""
    squares = ops.square(targets - outputs)
    return ops.max(squares) if workers.place()[1] == 1 else ops.mean(squares)


class OwnLoss(keras.Model):
    """A model with its own `compute_loss`, which compares examples."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return largest(y, y_pred)


class Objectives(keras.Model):
    """A model with an objective that compares examples."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective("own", self.largest)]

    def largest(self, batch: Any, training: bool) -> Any:
        outputs = self.dense(batch[0])
        return outputs - ops.max(outputs) + 1.0


def refused_alone(kind: str) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
        model: keras.Model = (
            Objectives()
            if kind == "objective"
            else (OwnLoss if kind == "compute_loss" else keras.Model)(inputs, outputs)
        )
        model.compile("sgd", largest if kind == "loss" else "mse")
        return model

    return build


REFUSED_ALONE = ("loss", "compute_loss", "objective")


def other_data(kind: str) -> tuple[Any, Any]:
    """Return features and targets, which are invalid on worker 1."""
    features, targets = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    if workers.place()[1] == 0:
        return features, targets
    return {
        "lengths": (features, targets[:7]),
        "empty": (features[:0], targets[:0]),
        "inputs": (features[:, :3], targets),
        "targets": (features, np.ones((8, 3, 1), "float32")),
        "widths": (features, np.ones((8, 2), "float32")),
    }[kind]


def of_other_data(strategy: tfpar.Strategy, kind: str) -> None:
    """Fit, then evaluate, data that is invalid on one worker only."""
    trainer = tfpar.Trainer(refused_alone("plain"), strategy, seed=0)
    messages = []
    for call in (trainer.fit, trainer.evaluate):
        try:
            call(*other_data(kind), batch_size=4, verbose=0)
        except ValueError as error:
            messages.append(str(error))
    raise ValueError("\n".join(messages))


def words_resumed(strategy: tfpar.Strategy, source: str, shard_by: str) -> Any:
    checkpoints = workers.place()[0] / f"words in {source} by {shard_by}"
    return category_cases.train(strategy, source, shard_by, checkpoints)


def unreadable(strategy: tfpar.Strategy, first: int) -> str:
    """Fit data that worker 1 cannot read from one example on, and return the error as a text."""

    def read(number: tf.Tensor) -> Any:
        readable = number < first if workers.place()[1] == 1 else True
        with tf.control_dependencies([tf.debugging.Assert(readable, ["data/7.png is broken."])]):
            return tf.ones([4]) * tf.cast(number, tf.float32), tf.ones([1])

    strategy.user_message = functools.partial(tfpar.data.user_message, settings=config.Data())
    try:
        train(strategy, refused_alone("plain"), lambda: tf.data.Dataset.range(40).map(read).batch(8))
    except (tf.errors.OpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# The first example that worker 1 cannot read. The last one: nothing communicates after a failure inside of a step.
UNREADABLE = {"in the first batch": 3, "in a later batch": 20}
OTHER_DATA = ("lengths", "empty", "inputs", "targets", "widths")


def main() -> None:
    strategy = tfpar.MultiWorker()
    gathering = tfpar.MultiWorker(batch_dependent_layers="gather")
    functions = {name: functools.partial(train, gathering, *given) for name, given in TRAINED.items()}
    others = {
        "mirrored": tfpar.Mirrored,
        "predict": functools.partial(predict, gathering),
        "refused": functools.partial(refused, strategy),
    }
    alone = {
        f"refused alone: {kind}": functools.partial(train, strategy, refused_alone(kind), only_of_worker_1)
        for kind in REFUSED_ALONE
    }
    data = {f"other data: {kind}": functools.partial(of_other_data, strategy, kind) for kind in OTHER_DATA}
    inference = {
        name: functools.partial(function, gathering if name.startswith("gathered") else strategy)
        for name, function in (("refused in inference", evaluated), ("gathered in inference", evaluated))
    }
    categories = {
        f"words: {source} by {shard_by}": functools.partial(words_resumed, strategy, source, shard_by)
        for source, shard_by in category_cases.CASES
    }
    images = {
        f"unreadable {name}": functools.partial(unreadable, strategy, first) for name, first in UNREADABLE.items()
    }
    workers.run_all({**functions, **others, **inference, **categories, **alone, **data, **images})


if __name__ == "__main__":
    main()

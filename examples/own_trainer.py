"""A trainer of your own for the train command: its model, its data, its options.

Start it from the folder above with
`python -m tfpar.train --set trainer=examples.own_trainer.Perceptron --directory runs/perceptron`.
`--set options.hidden=1024` and `--set training.epochs=20` make it larger, and the same command again resumes.
On the CPU
`python -m tfpar.train --set trainer=examples.own_trainer.Perceptron --directory runs/perceptron_in_stages
--set strategy.kind=pipeline --set strategy.num_stages=2 --set strategy.num_microbatches=4
--set strategy.num_logical_cpus=2` trains it in a pipeline; on two GPUs leave out the last setting.
Put the settings into a TOML file and name it with `--config`.
It prints what the run will do, a line an epoch, and at the end the digit that is recognized worst: with several workers
each predicts its part for `report`, and the chief prints the result.
"""

import numpy as np
import pydantic
from sklearn.datasets import load_digits

import tfpar

import keras  # isort: skip  in this order TensorFlow starts without messages
import tensorflow as tf

from tfpar import config

NUM_TRAIN_EXAMPLES = 1500


class Perceptron(tfpar.Trainer):
    """A hidden layer and a softmax on 1,797 real images of digits."""

    # Any other key that a run sets is refused, for it would have no effect.
    reads = ("seed", "training.global_batch_size", "optimizer.learning_rate")

    class Options(pydantic.BaseModel):
        """What `[options]` of a run may hold."""

        hidden: int = pydantic.Field(32, ge=1)

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype("float32")
        examples = tf.data.Dataset.from_tensor_slices((images, labels))
        self.num_train_examples = NUM_TRAIN_EXAMPLES
        self.train_data = (
            examples.take(NUM_TRAIN_EXAMPLES)
            .shuffle(NUM_TRAIN_EXAMPLES, seed=run.seed)
            .batch(run.training.global_batch_size)
        )
        self.validation_data = examples.skip(NUM_TRAIN_EXAMPLES).batch(run.training.global_batch_size)
        self._held_out = images[NUM_TRAIN_EXAMPLES:], labels[NUM_TRAIN_EXAMPLES:]
        options = run.options_as(self.Options)

        def build_model() -> keras.Model:
            layers = [keras.layers.Dense(options.hidden, "relu"), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((64,)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(run.optimizer.learning_rate), loss, metrics=["accuracy"])
            return model

        super().__init__(build_model, strategy, run.seed)

    def report(self, results: dict[str, float]) -> str:
        """Say which digit is recognized worst; every worker calls it, and the chief prints the text at the end."""
        images, labels = self._held_out
        recognized = self.predict(images, verbose=0).argmax(axis=1) == labels
        shares = [recognized[labels == digit].mean() for digit in range(10)]
        worst = int(np.argmin(shares))
        return f"recognized worst: {worst}, in {shares[worst]:.0%} of {np.sum(labels == worst)} images"

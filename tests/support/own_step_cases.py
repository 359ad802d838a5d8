"""Models with steps of their own, as people write them for Keras: `train_step`, `test_step` and `predict_step`.

Where a step draws, the tests replace the numbers by typical ones on all sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar

NUM_FEATURES, NUM_ROWS = 6, 22
LATENT = 3


class Case(NamedTuple):
    """A model and its data.

    Args:
        build: Returns the compiled model.
        data: Returns global batches of at most 8 rows; the last one has 6.
        validates: Whether the model has a step for validation.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], tf.data.Dataset]
    validates: bool = False


def features(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(NUM_ROWS, NUM_FEATURES)).astype(keras.config.floatx())


def unlabelled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(features()).batch(8)


def labelled() -> tf.data.Dataset:
    rows = features()
    return tf.data.Dataset.from_tensor_slices((rows, (rows[:, :1] > 0).astype(rows.dtype))).batch(8)


def weighted() -> tf.data.Dataset:
    rows = features()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, NUM_ROWS).astype(rows.dtype)
    return tf.data.Dataset.from_tensor_slices((rows, (rows[:, :1] > 0).astype(rows.dtype), weights)).batch(8)


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((features(), features(1))).batch(8)


def triplets() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(((features(), features(1), features(2)),)).batch(8)


def tokens() -> tf.data.Dataset:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 6, NUM_ROWS)
    rows = np.where(np.arange(5) < lengths[:, None], random.integers(1, 9, (NUM_ROWS, 5)), 0)
    return tf.data.Dataset.from_tensor_slices((rows, rows[:, ::-1].copy())).batch(8)


def network(*sizes: int, last: int = NUM_FEATURES) -> keras.Sequential:
    return keras.Sequential([*(layers.Dense(size, "tanh") for size in sizes), layers.Dense(last)])


class Guide(keras.Model):
    """The step of Keras' guide: the losses and metrics of `compile`, with sample weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.body, self.head = layers.Dense(5, "tanh", kernel_regularizer="l2"), layers.Dense(1, "sigmoid")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.head(self.body(inputs))

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(self.changed(gradients), self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def changed(self, gradients: list[Any]) -> list[Any]:
        return gradients

    def test_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, y, predicted, sample_weight)


class Centralized(Guide):
    """Gradients without their mean over the inputs of a layer."""

    def changed(self, gradients: list[Any]) -> list[Any]:
        return [each - ops.mean(each, axis=0, keepdims=True) if len(each.shape) > 1 else each for each in gradients]


class Adversarial(Guide):
    """Trains on inputs moved along the sign of their own gradient."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = keras.losses.binary_crossentropy(y, self(x))
        moved = x + 0.1 * ops.sign(tape.gradient(loss, x))
        return super().train_step((moved, y))


class VAE(keras.Model):
    """A variational autoencoder whose noise is drawn in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(8, last=2 * LATENT), network(8)
        self.seeds = keras.random.SeedGenerator(1)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def losses_of(self, rows: Any) -> tuple[Any, Any, Any]:
        mean, log_variance = ops.split(self.encoder(rows), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        reconstruction = ops.mean(ops.sum(ops.square(decoded - rows), axis=-1))
        divergence = -0.5 * ops.mean(ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=-1))
        return reconstruction + divergence, reconstruction, divergence

    def train_step(self, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = self.losses_of(rows)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.count(losses)

    def test_step(self, rows: Any) -> Any:
        return self.count(self.losses_of(rows))

    def count(self, losses: Any) -> Any:
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class GAN(keras.Model):
    """A deep convolutional GAN in small: two optimizers, noise and noisy labels."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((NUM_FEATURES,)), layers.Reshape((NUM_FEATURES, 1)), layers.Conv1D(4, 3, activation="tanh"),
             layers.Flatten(), layers.Dense(1)]
        )  # fmt: skip
        self.generator = keras.Sequential([keras.Input((LATENT,)), *network(8).layers])

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real: Any) -> Any:
        batch_size = ops.shape(real)[0]
        noise = tf.random.normal([batch_size, LATENT], dtype=real.dtype)
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels), dtype=labels.dtype)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        noise = tf.random.normal([batch_size, LATENT], dtype=real.dtype)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), predictions)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class WGAN(GAN):
    """A Wasserstein GAN with a gradient penalty, whose critic is updated three times; logs the losses themselves."""

    @property
    def metrics(self) -> list[Any]:
        return []

    def train_step(self, real: Any) -> Any:
        batch_size = tf.shape(real)[0]
        for _ in range(3):
            noise = tf.random.normal((batch_size, LATENT), dtype=real.dtype)
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                scores = self.discriminator(made, training=True), self.discriminator(real, training=True)
                cost = tf.reduce_mean(scores[0]) - tf.reduce_mean(scores[1])
                critic_loss = cost + 10.0 * self.penalty(batch_size, real, made)
            gradients = tape.gradient(critic_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables, strict=True))
        noise = tf.random.normal((batch_size, LATENT), dtype=real.dtype)
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            generator_loss = -tf.reduce_mean(self.discriminator(made, training=True))
        gradients = tape.gradient(generator_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        return {"d_loss": critic_loss, "g_loss": generator_loss}

    def penalty(self, batch_size: Any, real: Any, made: Any) -> Any:
        alpha = tf.random.uniform([batch_size, 1], dtype=real.dtype)
        between = real + alpha * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.discriminator(between, training=True)
        norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, between)), axis=[1]))
        return tf.reduce_mean((norm - 1.0) ** 2)


class Cycle(keras.Model):
    """Two generators and two discriminators under one persistent tape, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {name: network(6) for name in ("to_b", "to_a")} | {
            name: network(6, last=1) for name in ("is_a", "is_b")
        }

    def compile(self, make_optimizer: Callable[[], Any]) -> None:
        super().compile()
        self.optimizers = {name: make_optimizer() for name in self.parts}

    def train_step(self, data: Any) -> Any:
        a, b = data
        parts, squares = self.parts, lambda value: ops.mean(ops.square(value))
        with tf.GradientTape(persistent=True) as tape:
            made_b, made_a = parts["to_b"](a), parts["to_a"](b)
            cycled = squares(parts["to_a"](made_b) - a) + squares(parts["to_b"](made_a) - b)
            losses = {
                "to_b": squares(parts["is_b"](made_b) - 1.0) + 10.0 * cycled,
                "to_a": squares(parts["is_a"](made_a) - 1.0) + 10.0 * cycled,
                "is_a": squares(parts["is_a"](a) - 1.0) + squares(parts["is_a"](made_a)),
                "is_b": squares(parts["is_b"](b) - 1.0) + squares(parts["is_b"](made_b)),
            }
        for name, loss in losses.items():
            weights = parts[name].trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizers[name].apply_gradients(zip(gradients, weights, strict=True))
        return losses


class Diffusion(keras.Model):
    """Denoising diffusion with a moving average of the network, which validation and predictions use."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.Input((NUM_FEATURES + 1,)), *network(8).layers])
        self.ema_network = keras.models.clone_model(self.network)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss_tracker]

    def denoise(self, rows: Any, noise: Any, rates: Any, training: bool) -> Any:
        network = self.network if training else self.ema_network
        return network(ops.concatenate([rates * rows + (1.0 - rates) * noise, rates], axis=-1), training=training)

    def step(self, rows: Any, training: bool) -> Any:
        noise = keras.random.normal(ops.shape(rows), dtype=rows.dtype)
        rates = keras.random.uniform((ops.shape(rows)[0], 1), 0.1, 0.9, dtype=rows.dtype)
        return ops.mean(ops.abs(noise - self.denoise(rows, noise, rates, training)))

    def train_step(self, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.step(rows, training=True)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss_tracker.update_state(loss)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, rows: Any) -> Any:
        self.noise_loss_tracker.update_state(self.step(rows, training=False))
        return {metric.name: metric.result() for metric in self.metrics}

    def predict_step(self, rows: Any) -> Any:
        return self.denoise(rows, ops.zeros_like(rows), ops.full((ops.shape(rows)[0], 1), 0.5), training=False)


class SimCLR(keras.Model):
    """Contrasts two views of an example with the views of all others, which tfpar.gather collects."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(8, last=4)
        self.contrast_tracker = keras.metrics.Mean(name="c_loss")

    def train_step(self, data: Any) -> Any:
        first, second = data
        with tf.GradientTape() as tape:
            one, other = ops.normalize(self.encoder(first)), ops.normalize(self.encoder(second))
            similarities = 5.0 * ops.matmul(tfpar.gather(one), ops.transpose(tfpar.gather(other)))
            labels = ops.arange(ops.shape(similarities)[0])
            losses = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
            loss = ops.mean(losses)
        weights = self.encoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.contrast_tracker.update_state(loss)
        return {"c_loss": self.contrast_tracker.result()}


class Distiller(keras.Model):
    """A student that learns from labels and from the outputs of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(4, last=3), network(8, last=3)

    def compile(self, **settings: Any) -> None:
        super().compile(**settings)
        self.teacher.trainable = False
        self.student_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.distillation_loss = keras.losses.KLDivergence()

    def call(self, rows: Any) -> Any:
        return self.student(rows)

    def train_step(self, data: Any) -> Any:
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predicted = self.student(x, training=True)
            of_labels = self.student_loss(y, predicted)
            of_teacher = self.distillation_loss(ops.softmax(taught / 3.0), ops.softmax(predicted / 3.0)) * 9.0
            loss = 0.1 * of_labels + 0.9 * of_teacher
        weights = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        logs = self.compute_metrics(x, y, predicted, None)
        return {**logs, "student_loss": of_labels, "distillation_loss": of_teacher}

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self.student(x, training=False)
        return {**self.compute_metrics(x, y, predicted, None), "student_loss": self.student_loss(y, predicted)}


class Siamese(keras.Model):
    """Distances within triplets, with a hinge."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = network(8, last=4)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def triplet_loss(self, rows: Any) -> Any:
        anchor, positive, negative = (self.embedding(each) for each in rows)
        near, far = (ops.sum(ops.square(anchor - other), axis=-1) for other in (positive, negative))
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data[0])
        gradients = tape.gradient(loss, self.embedding.trainable_weights)  # of the sum over the batch
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.loss_tracker.update_state(self.triplet_loss(data[0]))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


class Masked(keras.Model):
    """A masked autoencoder: random features of each row are hidden, and the loss is over the hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.autoencoder = network(8)

    def call(self, rows: Any) -> Any:
        return self.autoencoder(rows)

    def train_step(self, rows: Any) -> Any:
        order = keras.random.uniform(ops.shape(rows), dtype=rows.dtype)
        hidden = ops.cast(ops.argsort(ops.argsort(order + 1e-3 * rows, axis=-1), axis=-1) < 2, rows.dtype)
        with tf.GradientTape() as tape:
            errors = ops.square(self(rows * (1.0 - hidden), training=True) - rows)
            loss = self.compute_loss(y=rows * hidden, y_pred=self(rows * (1.0 - hidden), training=True) * hidden)
            loss += ops.sum(errors * hidden) / ops.sum(hidden)  # as many hidden features in each row
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, **self.compute_metrics(rows, rows, self(rows), None)}


class Sequences(keras.Model):
    """Targets under the mask of an Embedding, which sparse gradients train; counts the tokens and the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = layers.Embedding(9, 6, mask_zero=True), layers.Dense(9)
        self.num_rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="num_rows")
        self.num_steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="steps")

    def call(self, tokens: Any) -> Any:
        return self.head(self.embedding(tokens))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.num_rows.assign_add(ops.cast(ops.shape(x)[0], self.num_rows.dtype))
        self.num_steps.assign_add(1)
        self.optimizer.learning_rate.assign(0.9 * self.optimizer.learning_rate)
        return {"loss_of_tokens": loss}


def compiled(kind: Callable[[], keras.Model], *arguments: Any, **settings: Any) -> Callable[[], keras.Model]:
    """Return a function that makes a model and compiles it; functions among the arguments return them."""

    def build() -> keras.Model:
        model = kind()
        of_model = {name: value() if callable(value) else value for name, value in settings.items()}
        model.compile(*(each() for each in arguments), **of_model)
        return model

    return build


def gan(kind: type[GAN]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = kind()
        loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.02), loss_fn)
        return model

    return build


def cycle() -> keras.Model:
    model = Cycle()
    model.compile(lambda: keras.optimizers.Adam(0.01, beta_1=0.5))
    return model


def distilled() -> keras.Model:
    """The Distiller of Keras, which overrides `compute_loss`."""
    teacher, student = (
        keras.Sequential([keras.Input((NUM_FEATURES,)), *network(size, last=3).layers]) for size in (8, 4)
    )
    loss = keras.distillation.LogitsDistillation(temperature=2.0)
    model = keras.distillation.Distiller(teacher, student, loss, student_loss_weight=0.3)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def adam(**settings: Any) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.Adam(0.01, **settings)


_OF_GUIDE: dict[str, Any] = {"loss": "binary_crossentropy", "weighted_metrics": ["accuracy", "mae"]}
CASES: dict[str, Case] = {
    "guide": Case(compiled(Guide, optimizer=adam(global_clipnorm=0.1), **_OF_GUIDE), weighted, validates=True),
    "accumulated, averaged": Case(
        compiled(Guide, optimizer=adam(gradient_accumulation_steps=2, use_ema=True), **_OF_GUIDE), labelled
    ),
    "centralized": Case(
        compiled(Centralized, optimizer=adam(weight_decay=0.01), **_OF_GUIDE), labelled, validates=True
    ),
    "adversarial": Case(compiled(Adversarial, optimizer=adam(), **_OF_GUIDE), labelled),
    "VAE": Case(compiled(VAE, optimizer=adam(clipnorm=0.5)), unlabelled, validates=True),
    "GAN": Case(gan(GAN), unlabelled),
    "WGAN-GP": Case(gan(WGAN), unlabelled),
    "cycle": Case(cycle, pairs),
    "diffusion": Case(compiled(Diffusion, optimizer=lambda: keras.optimizers.AdamW(0.01)), unlabelled, validates=True),
    "SimCLR": Case(compiled(SimCLR, optimizer=lambda: keras.optimizers.SGD(0.1)), pairs),
    "distiller": Case(
        compiled(Distiller, optimizer=adam(), metrics=["sparse_categorical_accuracy"]), labelled, validates=True
    ),
    "Keras' distiller": Case(distilled, labelled),
    "siamese": Case(compiled(Siamese, optimizer=lambda: keras.optimizers.SGD(0.01, momentum=0.9)), triplets, True),
    "masked autoencoder": Case(compiled(Masked, optimizer=adam(), loss="mse", metrics=["mae"]), unlabelled),
    "masked sequences": Case(
        compiled(
            Sequences,
            optimizer=adam(),
            loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        tokens,
    ),
}

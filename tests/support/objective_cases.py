"""Models with a custom `train_step` and, for tfpar, the same as objectives: a GAN, a VAE, a contrastive loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support.parity_cases import NUM_FEATURES, Case, inputs

NOISE = 3


def _binary_crossentropy(is_real: float, logits: Any) -> Any:
    """One value per example."""
    return keras.losses.binary_crossentropy(ops.full_like(logits, is_real), logits, from_logits=True)


class GAN(keras.Model):
    """A discriminator and a generator with an optimizer each; the noise is part of the data."""

    def __init__(self, **discriminator_settings: Any) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(NUM_FEATURES)])
        self.discriminator_optimizer = keras.optimizers.Adam(0.01, **discriminator_settings)
        self.generator_mean = keras.metrics.Mean(name="generator_loss")
        self.discriminator_mean = keras.metrics.Mean(name="discriminator_loss")

    def objectives(self) -> list[tfpar.Objective]:
        return [
            tfpar.Objective(
                "discriminator_loss", self.discriminator_loss, self.discriminator, self.discriminator_optimizer
            ),
            tfpar.Objective("generator_loss", self.generator_loss, self.generator),
        ]

    def discriminator_loss(self, batch: Any, training: bool) -> Any:
        real, noise = batch
        made = self.generator(noise, training=training)
        of_real = _binary_crossentropy(1.0, self.discriminator(real, training=training))
        return of_real + _binary_crossentropy(0.0, self.discriminator(made, training=training))

    def generator_loss(self, batch: Any, training: bool) -> Any:
        _, noise = batch
        made = self.generator(noise, training=training)
        return _binary_crossentropy(1.0, self.discriminator(made, training=training))

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            of_discriminator = ops.mean(self.discriminator_loss(batch, True))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(of_discriminator, weights)
        self.discriminator_optimizer.apply(gradients, weights)
        with tf.GradientTape() as tape:
            of_generator = ops.mean(self.generator_loss(batch, True))
        weights = self.generator.trainable_weights
        self.optimizer.apply(tape.gradient(of_generator, weights), weights)
        size = ops.shape(batch[0])[0]
        self._loss_tracker.update_state(of_discriminator + of_generator, sample_weight=size)
        self.discriminator_mean.update_state(of_discriminator, sample_weight=size)
        self.generator_mean.update_state(of_generator, sample_weight=size)
        return {metric.name: metric.result() for metric in self.metrics}


def gan(**discriminator_settings: Any) -> keras.Model:
    model = GAN(**discriminator_settings)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def pairs_with_noise() -> tf.data.Dataset:
    noise = np.random.default_rng(9).normal(size=(73, NOISE)).astype(keras.config.floatx())
    return tf.data.Dataset.from_tensor_slices((inputs(73), noise)).batch(8)


class VAE(keras.Model):
    """A variational autoencoder; the noise is part of the data, and two metrics count parts of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(2 * NOISE)])
        self.decoder = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(NUM_FEATURES)])
        self.reconstruction = keras.metrics.Mean(name="reconstruction")
        self.divergence = keras.metrics.Mean(name="divergence")

    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective("loss", self.evidence_lower_bound)]

    def evidence_lower_bound(self, batch: Any, training: bool) -> Any:
        features, noise = batch
        mean, log_variance = ops.split(self.encoder(features, training=training), 2, axis=-1)
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise, training=training)
        reconstruction = ops.sum(ops.square(decoded - features), axis=-1)
        divergence = -0.5 * ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=-1)
        self.reconstruction.update_state(reconstruction)
        self.divergence.update_state(divergence)
        return reconstruction + divergence

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(self.evidence_lower_bound(batch, True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self._counted(loss, batch)

    def test_step(self, batch: Any) -> Any:
        return self._counted(ops.mean(self.evidence_lower_bound(batch, False)), batch)

    def _counted(self, loss: Any, batch: Any) -> Any:
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(batch[0])[0])
        return {metric.name: metric.result() for metric in self.metrics}


def vae() -> keras.Model:
    model = VAE()
    model.compile(optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5))
    return model


class Contrastive(keras.Model):
    """Attracts the two views of an example and repels those of others: every loss needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(4)])

    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective("loss", self.contrast)]

    def contrast(self, batch: Any, training: bool) -> Any:
        features, views = batch
        one = ops.normalize(self.encoder(features, training=training))
        other = ops.normalize(self.encoder(views, training=training))
        similarities = 5.0 * ops.matmul(one, ops.transpose(tfpar.gather(other)))
        return ops.logsumexp(similarities, axis=-1) - 5.0 * ops.sum(one * other, axis=-1)

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.mean(self.contrast(batch, True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(batch[0])[0])
        return {metric.name: metric.result() for metric in self.metrics}


def contrastive() -> keras.Model:
    model = Contrastive()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


def views() -> tf.data.Dataset:
    noise = 0.1 * np.random.default_rng(9).normal(size=(73, NUM_FEATURES))
    features = inputs(73)
    return tf.data.Dataset.from_tensor_slices((features, (features + noise).astype(features.dtype))).batch(8)


CASES: dict[str, Case] = {
    "GAN": Case(gan, pairs_with_noise),
    "GAN, clipped and accumulated": Case(
        lambda: gan(gradient_accumulation_steps=2, global_clipnorm=0.05), pairs_with_noise
    ),
    "VAE": Case(vae, pairs_with_noise, validates=True),
    "contrastive": Case(contrastive, views),
}

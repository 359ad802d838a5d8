"""A small transformer that learns to write Python byte by byte."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfpar
from tfpar import config, data
from tfpar.data.sources import python_source
from tfpar.trainers import recipe

PROMPT = b"def "
SAMPLE_BYTES = 400
TEMPERATURE = 0.7
EMBEDDING_DEVIATION = 0.02  # as in GPT-2; logits of the tied projection then start near 0


class LanguageModel(tfpar.Trainer):
    """Train a decoder-only transformer on Python's own source files.

    Args:
        run: The run.
        strategy: The strategy.

    Raises:
        ValueError: If the model of the run is not "transformer", its width is not a multiple of its heads, or its data
            source is not "python_source".

    Example:
        >>> run = config.load("configs/language_model.toml", ["model.num_blocks=1", "data.train_split=train[:1%]"])
        >>> trainer = LanguageModel(run, tfpar.SingleDevice())
        >>> trainer.fit(trainer.train_data, epochs=1, steps_per_epoch=2)
        >>> trainer.generate(b"import ", 20)
    """

    reads = ("model", *recipe.READS)

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        for key, received, allowed in (
            ("model.name", run.model.name, "transformer"),
            ("data.source", run.data.source, "python_source"),
        ):
            if received != allowed:
                raise ValueError(
                    f'tfpar.trainers.language_model.LanguageModel needs {key} = "{allowed}", received "{received}": '
                    "set it, or use another trainer."
                )
        model = run.model
        if model.width % model.num_heads:
            below = model.width // model.num_heads * model.num_heads
            raise ValueError(
                f"model.width = {model.width} must be a multiple of model.num_heads = {model.num_heads}: set it to "
                f"{below + model.num_heads}, or change the number of heads."
            )
        keras.utils.set_random_seed(run.seed)
        loaded = data.load(run.data, global_batch_size=run.training.global_batch_size, seed=run.seed)
        self.train_data, self.validation_data = loaded.train, loaded.validation
        self.num_train_examples, self.sharding = loaded.num_train_examples, loaded.sharding
        recipe.set_precision(run.training.precision)
        model_function = functools.partial(build_model, run, *loaded.input_shape)
        super().__init__(model_function, strategy, run.seed, fused=run.training.fused)

    def report(self, results: dict[str, float]) -> str:
        """Return the cross-entropy next to the unigram entropy, and a generated sample; the train command prints it.

        Args:
            results: The metrics of the run: `val_bits_per_byte`, or `bits_per_byte` without validation.
        """
        validated = self.validation_data is not None
        batches = self.train_data if self.validation_data is None else self.validation_data
        batches = batches.global_batches() if isinstance(batches, data.Sharded) else batches
        entropy = python_source.unigram_entropy((inputs, labels.numpy()) for inputs, labels in batches)
        bits = results["val_bits_per_byte" if validated else "bits_per_byte"]
        sample = self.generate(PROMPT, SAMPLE_BYTES).decode(errors="replace")
        printable = "".join(
            character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
            for character in sample
        )
        return (
            f"{bits:.3f} bits per byte on the {'validation' if validated else 'training'} text; its unigram entropy "
            f"is {entropy:.3f}.\nThe model continues {PROMPT.decode()!r} (temperature {TEMPERATURE}):\n\n{printable}"
        )

    def generate(self, prompt: bytes, num_bytes: int, temperature: float = TEMPERATURE) -> bytes:
        """Continue a prompt with bytes sampled from the predicted distribution, with the trainer's seed.

        Args:
            prompt: At least one byte; the model reads as many of the last ones as its context is long.
            num_bytes: Number of bytes to add.
            temperature: Divisor of the logits, above 0; below 1 favours likely bytes.

        Returns:
            The prompt and its continuation.

        Raises:
            ValueError: If the prompt is empty or the temperature is not above 0.
        """
        if not prompt:
            raise ValueError('A prompt must have at least one byte, received none: give one, such as b"\\n".')
        if not temperature > 0:
            raise ValueError(
                f"temperature must be above 0, received {temperature}: near 0, the likeliest byte is drawn."
            )
        generator = np.random.default_rng(self.seed)
        predict = tf.function(functools.partial(self.model, training=False))
        (context_bytes,) = self.model.input_shape[1:]
        written = bytearray(prompt)
        for _ in range(num_bytes):
            seen = written[-context_bytes:]
            # Padding after the last byte has no effect on its logits, and avoids tracing for each length.
            window = np.frombuffer(seen.ljust(context_bytes, b"\0"), np.uint8).astype("int32")
            logits = predict(window[np.newaxis])[0, len(seen) - 1].numpy().astype("float64") / temperature
            weights = np.exp(logits - logits.max())
            written.append(generator.choice(python_source.NUM_BYTES, p=weights / weights.sum()))
        return bytes(written)

    def save(self, path: str | Path) -> None:
        """Save the model without its own metric, whose code plain Keras could not load.

        Args:
            path: As for `tfpar.Trainer.save`.
        """
        compiled = self.model.get_compile_config() | {"metrics": None}
        self.model.get_compile_config = lambda: compiled
        try:
            super().save(path)
        finally:
            del self.model.get_compile_config


def bits_per_byte(labels: Any, logits: Any) -> Any:
    """Return the cross-entropy of each byte in bits, `[batch, context]`.

    Args:
        labels: Integers `[batch, context]`.
        logits: Logits `[batch, context, 256]`.
    """
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True) / math.log(2)


def build_model(run: config.Run, context_bytes: int) -> keras.Model:
    """Build and compile the transformer of a run, as a Functional model of Keras' own layers.

    It has pre-normalization (Xiong et al., arXiv 2002.04745), learned positions, and an embedding tied to the
    projection to logits (Press and Wolf, arXiv 1608.05859).

    Args:
        run: The run, whose `model`, `optimizer` and `training` sections are read.
        context_bytes: Bytes of an example.

    Returns:
        A compiled model from bytes `[batch, context_bytes]`, as integers, to logits of the next bytes
        `[batch, context_bytes, 256]`.
    """
    settings = run.model
    # Logits in float32: a softmax in half precision loses small probabilities.
    dtype = "float32" if run.training.precision.startswith("mixed_") else None
    around_zero = keras.initializers.RandomNormal(stddev=EMBEDDING_DEVIATION)
    embedding = layers.ReversibleEmbedding(
        python_source.NUM_BYTES, settings.width, embeddings_initializer=around_zero, dtype=dtype, name="embedding"
    )
    tokens = keras.Input((context_bytes,), dtype="int32", name="bytes")
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    embedded_positions = layers.Embedding(
        context_bytes, settings.width, embeddings_initializer=around_zero, name="positions"
    )(positions)
    features = layers.Add(name="embedded")([embedding(tokens), embedded_positions])
    for index in range(settings.num_blocks):
        features = _block(settings, features, f"block_{index}")
    features = layers.LayerNormalization(name="normalization")(features)
    model = keras.Model(tokens, embedding(features, reverse=True), name=settings.name)
    model.compile(
        recipe.build_optimizer(run),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.MeanMetricWrapper(bits_per_byte, name="bits_per_byte")],
        jit_compile=run.training.jit_compile,
    )
    return model


def _block(settings: config.Model, features: Any, name: str) -> Any:
    """Add causal attention, then a perceptron, to the features."""
    penalty = recipe.build_penalty(settings)
    normalized = layers.LayerNormalization(name=f"{name}_attention_normalization")(features)
    attended = layers.MultiHeadAttention(
        settings.num_heads, settings.width // settings.num_heads, kernel_regularizer=penalty, name=f"{name}_attention"
    )(normalized, normalized, use_causal_mask=True)
    features = _add(settings, features, attended, f"{name}_attention")
    normalized = layers.LayerNormalization(name=f"{name}_perceptron_normalization")(features)
    hidden = layers.Dense(
        4 * settings.width, activation="gelu", kernel_regularizer=penalty, name=f"{name}_perceptron_hidden"
    )(normalized)
    outputs = layers.Dense(settings.width, kernel_regularizer=penalty, name=f"{name}_perceptron")(hidden)
    return _add(settings, features, outputs, f"{name}_perceptron")


def _add(settings: config.Model, features: Any, change: Any, name: str) -> Any:
    if settings.dropout:
        change = layers.Dropout(settings.dropout, name=f"{name}_dropout")(change)
    return layers.Add(name=f"{name}_sum")([features, change])

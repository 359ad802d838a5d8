"""A language model: a small transformer that learns to write Python, byte by byte, from Python's own source files."""

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
EMBEDDING_DEVIATION = 0.02  # GPT-2's; the tied projection then begins with logits near 0


class LanguageModel(tfpar.Trainer):
    """Train a decoder-only transformer on the bytes that a run's `data` section names.

    Args:
        run: The run.
        strategy: Where and how a step runs.

    Raises:
        ValueError: If the run asks for another model than "transformer", for heads that do not divide its width, or
            for other data than bytes.

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
        """Say how far the model is below the entropy of single bytes, and let it write; the train command prints it.

        Args:
            results: The metrics of the run; `val_bits_per_byte`, or `bits_per_byte` where nothing was validated.
        """
        validated = self.validation_data is not None
        batches = self.train_data if self.validation_data is None else self.validation_data
        batches = batches.global_batches() if isinstance(batches, data.Sharded) else batches
        entropy = python_source.unigram_entropy((inputs, labels.numpy()) for inputs, labels in batches)
        reached = results["val_bits_per_byte" if validated else "bits_per_byte"]
        written = self.generate(PROMPT, SAMPLE_BYTES).decode(errors="replace")
        printable = "".join(
            sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in written
        )
        return (
            f"{reached:.3f} bits per byte on the {'validation' if validated else 'training'} text; its unigram entropy "
            f"is {entropy:.3f}.\nThe model continues {PROMPT.decode()!r} (temperature {TEMPERATURE}):\n\n{printable}"
        )

    def generate(self, prompt: bytes, num_bytes: int, temperature: float = TEMPERATURE) -> bytes:
        """Continue a prompt byte by byte, each drawn from the predicted distribution with the trainer's seed.

        Args:
            prompt: At least one byte; the model reads the last ones, up to the length of its context.
            num_bytes: Number of bytes to add.
            temperature: Above 0. Below 1, likely bytes are drawn more often than predicted; above 1, less often.

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
            # The model ignores the padding after the last byte, and one shape is traced once.
            window = np.frombuffer(seen.ljust(context_bytes, b"\0"), np.uint8).astype("int32")
            logits = predict(window[np.newaxis])[0, len(seen) - 1].numpy().astype("float64") / temperature
            chances = np.exp(logits - logits.max())
            written.append(generator.choice(python_source.NUM_BYTES, p=chances / chances.sum()))
        return bytes(written)

    def save(self, path: str | Path) -> None:
        """Save the model as plain Keras, compiled without the metric: Keras could not load its code from here.

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
    """Return the cross-entropy of each byte in bits, the length of an ideal code by the model's predictions.

    Args:
        labels: Integers `[batch, context]`.
        logits: `[batch, context, 256]`.

    Returns:
        Bits `[batch, context]`.
    """
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True) / math.log(2)


def build_model(run: config.Run, context_bytes: int) -> keras.Model:
    """Build and compile the transformer of a run.

    Normalization comes before attention and perceptron (Xiong et al., arXiv 2002.04745), positions are learned, and
    the embedding of the bytes is also the projection to logits (Press and Wolf, arXiv 1608.05859). All layers are
    Keras' own, in one Functional model.

    Args:
        run: The run; its `model`, `optimizer` and `training` sections are read.
        context_bytes: Bytes of one example.

    Returns:
        A compiled model from integers `[batch, context_bytes]` to logits `[batch, context_bytes, 256]` of the bytes
        that come next.
    """
    settings = run.model
    # Logits in full precision: a softmax over half-precision numbers loses the small ones.
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
    """Attention to all earlier positions, then a perceptron for each position; each adds to the features."""
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
    found = layers.Dense(settings.width, kernel_regularizer=penalty, name=f"{name}_perceptron")(hidden)
    return _add(settings, features, found, f"{name}_perceptron")


def _add(settings: config.Model, features: Any, change: Any, name: str) -> Any:
    if settings.dropout:
        change = layers.Dropout(settings.dropout, name=f"{name}_dropout")(change)
    return layers.Add(name=f"{name}_sum")([features, change])

"""The backbones of KerasHub, models of several inputs inside of a model, are cut into stages as any layers."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import small

pytest.importorskip("keras_hub")
pytestmark = pytest.mark.usefixtures("logical_cpus")

VOCABULARY, LENGTH, EXAMPLES = 20, 6, 12
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 4, "intermediate_dim": 8, "dropout": 0.0}
random = np.random.default_rng(0)
TOKENS = random.integers(1, VOCABULARY, (EXAMPLES, LENGTH))
PADDING = (np.arange(LENGTH) < random.integers(2, LENGTH + 1, (EXAMPLES, 1))).astype("int32")


def bert() -> keras.Model:
    from keras_hub import models

    return models.BertBackbone(vocabulary_size=VOCABULARY, max_sequence_length=LENGTH, **SIZES)


def bart() -> keras.Model:
    from keras_hub import models

    return models.BartBackbone(vocabulary_size=VOCABULARY, max_sequence_length=LENGTH, **SIZES)


def llama() -> keras.Model:
    """In double precision it computes its positions in single precision."""
    from keras_hub import models

    heads = {"num_query_heads": 2, "num_key_value_heads": 1}
    sizes = {key: size for key, size in SIZES.items() if key not in ("num_heads", "dropout")}
    return models.LlamaBackbone(vocabulary_size=VOCABULARY, **sizes, **heads)


BACKBONES = {
    "bert": (bert, {"token_ids": TOKENS, "padding_mask": PADDING, "segment_ids": np.zeros_like(TOKENS)}),
    "bart": (
        bart,
        {f"{part}_{name}": value for part in ("encoder", "decoder")
         for name, value in (("token_ids", TOKENS), ("padding_mask", PADDING))},
    ),
    "llama": (llama, {"token_ids": TOKENS, "padding_mask": PADDING}),
}  # fmt: skip


def classifier(backbone_of: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        backbone = backbone_of()
        entries = {one.name: keras.Input(one.shape[1:], dtype=one.dtype, name=one.name) for one in backbone.inputs}
        outputs = backbone(entries)
        if isinstance(outputs, dict):
            outputs = outputs.get("sequence_output", outputs.get("decoder_sequence_output"))
        model = keras.Model(entries, layers.Dense(3, name="head")(ops.mean(outputs, axis=1)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return build


@pytest.mark.extended
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_trains_in_stages_as_on_one_device(name: str) -> None:
    backbone_of, inputs = BACKBONES[name]
    targets = np.random.default_rng(1).normal(size=(EXAMPLES, 3))
    with computing_in("float64"):
        build = classifier(backbone_of)
        keras.utils.set_random_seed(0)
        model = build()
        expected = model.fit(inputs, targets, batch_size=6, verbose=0, shuffle=False).history
        trainer = tfpar.Trainer(build, tfpar.Pipeline(3, 2, balance="parameters"), seed=0)
        found = trainer.fit(inputs, targets, batch_size=6, verbose=0, shuffle=False).history
        small.assert_same_history(found, expected, 1e-6)
        small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-6)
        rows = trainer.preview(inputs, targets, batch_size=6).rows
        assert len(rows) == 3
        assert all(row.num_parameters > 0.1 * model.count_params() for row in rows[:2])

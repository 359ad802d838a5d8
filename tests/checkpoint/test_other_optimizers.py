"""A checkpoint with the weights of the model and the state of another optimizer is refused by the optimizers' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import tfpar
from tests.support import shard_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

LAYOUTS: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": lambda: tfpar.SingleDevice(),
    "sharded weights": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
}
Make = Callable[[], Any]
OTHERS: dict[str, tuple[Make, Make, str]] = {
    "other class": (
        lambda: keras.optimizers.SGD(0.1, 0.9),
        lambda: keras.optimizers.Adam(0.01),
        "has the weights of this model, but the state of the optimizer sgd, and this model has adam. Resume with",
    ),
    "other class with equal slots": (
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(0.01),
        "but the state of the optimizer adam, and this model has adam_w. Resume with",
    ),
    "scaled loss": (
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        "but the state of the optimizer sgd, and this model has loss_scale_optimizer, sgd. Resume with",
    ),
    "moving average": (
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Adam(0.01, use_ema=True),
        "but the state of its optimizer with other settings: 'optimizer/adam/sequential_dense_kernel_average' is in",
    ),
    "schedule": (
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)),
        lambda: keras.optimizers.SGD(0.1),
        "other settings: 'optimizer/sgd/learning_rate' is in this model only. Resume with the optimizer that it was",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_optimizer_is_refused_and_no_weight_changes(
    layout: str, other: str, tmp_path: Path
) -> None:
    there, here, sentence = OTHERS[other]
    writer = tfpar.Trainer(shard_cases.classifier(there), LAYOUTS[layout](), seed=0)
    writer.build(small.data())
    checkpoints = tfpar.Checkpoints(tmp_path)
    checkpoints.save(writer.model, tfpar.checkpoint.Position(epoch=1), {})
    checkpoints.wait()
    trainer = tfpar.Trainer(shard_cases.classifier(here), LAYOUTS[layout](), seed=1)
    trainer.build(small.data())
    before = small.state(trainer.model)
    with pytest.raises(ValueError, match=r"step-00000000\.npz .*" + re.escape(sentence)):
        trainer.fit(small.data(), epochs=2, verbose=0, checkpoints=tfpar.Checkpoints(tmp_path))
    small.assert_same_state(small.state(trainer.model), before)

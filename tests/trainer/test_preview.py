"""Descriptions of a trainer and a strategy, and `preview` of a step, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops.test_hooks import STRATEGIES
from tests.support import parity_cases, small
from tfpar.engines.preview import Preview

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

DESCRIPTIONS = {
    "single_device": "SingleDevice on CPU:0",
    "mirrored": "Mirrored over 2 replicas on CPU:0, CPU:1",
    "pipeline": "Pipeline of 2 stages on CPU:0, CPU:1, 2 micro-batches, 1f1b",
}


def build_model() -> keras.Model:
    """A model with all kinds of state: random masks, moving statistics, moments of the optimizer."""
    layers = [
        keras.Input((parity_cases.NUM_FEATURES,), name="features"),
        keras.layers.Dense(8, "tanh", name="first"),
        keras.layers.BatchNormalization(name="normalize"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(parity_cases.NUM_CLASSES, name="last"),
    ]
    model = keras.Sequential(layers, name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def data() -> tf.data.Dataset:
    """Five batches, in another order every epoch."""
    arrays = (parity_cases.inputs(37), parity_cases.labels(37))
    return tf.data.Dataset.from_tensor_slices(arrays).shuffle(37, seed=3, reshuffle_each_iteration=True).batch(8)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return parity_cases.inputs(37), parity_cases.labels(37)


def pipeline() -> tfpar.Pipeline:
    return tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"], balance=[2, 2])


WITH: dict[str, Callable[[], tfpar.Strategy]] = {**STRATEGIES, "pipeline": pipeline}


def trained(trainer: tfpar.Trainer, *given: Any) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Train; return the history, and all state of the model and of Keras' global random state."""
    # Replicas average moving statistics after every call: how many steps it has must not depend on the time they take.
    history = trainer.fit(*given, epochs=2, verbose=0, steps_per_call=2).history
    return history, [*small.state(trainer.model), keras.ops.convert_to_numpy(keras.random.normal((3,)))]


class Batches(keras.utils.PyDataset):
    """Five batches, in an order of Keras' own every epoch."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        inputs, labels = arrays()
        return inputs[8 * index : 8 * index + 8], labels[8 * index : 8 * index + 8]


GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a shuffled dataset": lambda: (data(),),
    "arrays": arrays,
    "a PyDataset": lambda: (Batches(),),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "given"),
    [*((one, "a shuffled dataset") for one in WITH), ("pipeline", "arrays"), ("pipeline", "a PyDataset")],
)
def test_a_fit_after_a_preview_equals_one_without(strategy: str, given: str) -> None:
    results = []
    for previews in (0, 2):
        trainer = tfpar.Trainer(build_model, WITH[strategy](), seed=0)  # also seeds Python's own random numbers
        arguments = GIVEN[given]()
        for _ in range(previews):
            assert trainer.preview(*arguments).rows
        assert int(trainer.model.optimizer.iterations.numpy()) == 0
        results.append(trained(trainer, *arguments))
    small.assert_same_history(results[1][0], results[0][0], 0)
    small.assert_same_state(results[1][1], results[0][1])


@pytest.fixture(scope="module")
def preview(logical_cpus: list[str]) -> Preview:
    return tfpar.Trainer(build_model, pipeline(), seed=0).preview(data())


def test_a_preview_of_a_pipeline_holds_stages_and_the_predicted_step(preview: Preview) -> None:
    assert preview.rows[0].num_parameters == 8 * 5 + 8 + 4 * 8
    assert len(preview.rows) == 2
    assert preview.planned is not None
    assert preview.planned.step_seconds > 0
    assert 0 <= preview.planned.bubble < 1
    for text in ("1f1b: 2 stages on 2 devices, 2 micro-batches", "normalize", "last", "parameters", "predicted"):
        assert text in str(preview), f"{text!r} is missing in:\n{preview}"
    assert str(preview) == repr(preview) == preview.table


def test_a_notebook_shows_text_and_picture(preview: Preview) -> None:
    png = preview._repr_png_()
    assert png is not None
    assert png.startswith(b"\x89PNG")
    shown = preview._repr_html_()
    assert "1f1b: 2 stages" in shown
    assert '<img alt="schedule"' in shown
    assert "data:image/png;base64,iVBOR" in shown


@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_a_preview_of_other_strategies_holds_the_devices(strategy: str, tmp_path: Path) -> None:
    trainer = tfpar.Trainer(build_model, WITH[strategy](), seed=0)
    preview = trainer.preview(data())
    num_parameters = 8 * 5 + 8 + 4 * 8 + 8 * 3 + 3
    assert [row.num_parameters for row in preview.rows] == [num_parameters] * trainer.strategy.num_replicas
    assert [row.num_examples for row in preview.rows] == {"single_device": [8], "mirrored": [4, 4]}[strategy]
    # Weights, gradients and two moments: BatchNormalization's statistics have neither of the last.
    assert preview.rows[0].state_bytes >= 4 * (num_parameters + 3 * (num_parameters - 16))
    assert str(preview).startswith(DESCRIPTIONS[strategy])
    assert ("gradients are summed" in str(preview)) == (strategy == "mirrored")
    assert preview.planned is None
    assert preview._repr_png_() is None
    assert preview._repr_html_() == f"<pre>{preview.table}</pre>"
    with pytest.raises(ValueError, match="Only a pipeline has a schedule to draw"):
        preview.save(tmp_path / "schedule.png")


@pytest.mark.parametrize("strategy", WITH)
def test_strategy_and_trainer_are_described_in_one_line(strategy: str) -> None:
    trainer = tfpar.Trainer(build_model, WITH[strategy](), seed=0)
    assert repr(trainer.strategy) == f"<{DESCRIPTIONS[strategy]}>"
    shown = f"<Trainer of 'small', 107 parameters, Adam, step 0, on {DESCRIPTIONS[strategy]}>"
    assert repr(trainer) == shown

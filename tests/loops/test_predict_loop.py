"""The loop of predict: outputs are copied while the next step runs, and joined on the host."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small
from tfpar import data

pytestmark = pytest.mark.usefixtures("logical_cpus")


def test_outputs_are_copied_after_the_next_step_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    copied = data.to_numpy
    monkeypatch.setattr(data, "to_numpy", lambda tensor: (events.append("copy"), copied(tensor))[1])
    begins = keras.callbacks.LambdaCallback(on_predict_batch_begin=lambda batch, logs: events.append("step"))
    outputs = trainer.predict(parity_cases.inputs(20), batch_size=8, verbose=0, callbacks=begins)
    assert events == ["step", "step", "copy", "step", "copy", "copy"]
    np.testing.assert_allclose(outputs, trainer.model.predict(parity_cases.inputs(20), verbose=0), rtol=1e-5)


def test_a_callback_that_stops_keeps_the_outputs_of_its_step() -> None:
    class Stop(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    trainer = tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0)
    assert trainer.predict(parity_cases.inputs(20), batch_size=8, verbose=0, callbacks=Stop()).shape == (16, 3)

"""The phases of a step on several workers: the chief's report has the replicas of all."""

from pathlib import Path

import pytest

from tests.support import faults
from tests.support.command import settings
from tests.support.faults import launch
from tfpar.reports import recorded_run

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


OWN = """
import keras, numpy as np, tensorflow as tf, tfpar

class Wide(tfpar.Trainer):
    # Its gradients are large enough to be sent during the backward pass, some as their factors.
    reads = ("seed", "training.global_batch_size")
    validation_data, num_train_examples = None, 64

    def __init__(self, run, strategy):
        arrays = np.random.default_rng(0).normal(size=[64, 8]).astype("float32"), np.ones([64, 1], "float32")
        self.train_data = tf.data.Dataset.from_tensor_slices(arrays).batch(run.training.global_batch_size)
        super().__init__(build_model, strategy, run.seed)

def build_model():
    hidden = [keras.layers.Dense(256, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input([8]), *hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
"""


def test_the_report_of_a_traced_job_has_the_phases_of_all_workers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = settings("strategy.kind=multi_worker", "strategy.num_logical_cpus=2", "trainer=own.Wide")
    words += settings("training.global_batch_size=16", "training.epochs=3", "callbacks.tensorboard=false")
    outcome = faults.run([*launch(2), "--directory", "run", *words, "--trace"], tmp_path)
    assert outcome.code == 0, outcome
    assert outcome.out.count("phases ") == 1, "the chief alone"
    phases = recorded_run.read(tmp_path / "run").phases
    assert phases is not None
    assert phases.names == ("forward", "backward", "all-reduce", "update")
    assert len(phases.moments) == 4, "two workers with two devices each"
    assert len({row[1:] for row in phases.moments}) == 4, "each measured by its own"
    assert all(0 < row[-1] < 1 for row in phases.moments)

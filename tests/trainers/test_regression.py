"""The regression trainer: it finds the true weights, with few rows in memory."""

import numpy as np
import pytest

import tfpar
from tests.support.command import ROOT
from tfpar import config
from tfpar.cluster.process_memory import peak_bytes, reset_peak, resident_bytes
from tfpar.data.sources import synthetic
from tfpar.trainers.regression import Regression, build_model

pytestmark = pytest.mark.usefixtures("logical_cpus")

SMALL = ROOT / "configs" / "regression_small.toml"


def peak_growth_bytes(run: config.Run) -> int:
    """By how much this process grows at most while it trains a run."""
    reset_peak()
    before = resident_bytes()
    trainer = Regression(run, tfpar.SingleDevice())
    trainer.fit(trainer.train_data, epochs=1, verbose=0)
    return peak_bytes() - before


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=["one device", "two replicas"])
def test_it_learns_the_true_weights(devices: list[str]) -> None:
    run = config.load(SMALL)
    trainer = Regression(run, tfpar.Mirrored(devices) if len(devices) > 1 else tfpar.SingleDevice(devices[0]))
    trainer.fit(trainer.train_data, epochs=1, verbose=0)
    weights, bias = trainer.model.get_weights()
    truth = synthetic.truth(run.data.num_features, run.seed)
    np.testing.assert_allclose(weights[:, 0], truth.weights, atol=0.01)
    assert bias[0] == pytest.approx(truth.bias, abs=0.01)
    loss, _ = trainer.evaluate(trainer.validation_data, verbose=0)
    assert loss == pytest.approx(run.data.noise**2, rel=0.05), "all but the noise is explained"


def test_ten_times_the_rows_need_no_more_memory() -> None:
    """4,000,000 rows of 20 features and a label are 336 MB; they flow by."""
    overrides = ["data.num_features=20", "data.validation_split=none", "training.global_batch_size=8192"]
    few, many = (
        peak_growth_bytes(config.load(SMALL, [*overrides, f"data.num_examples={num_examples}"]))
        for num_examples in (400_000, 4_000_000)
    )
    assert many - few < 60e6, f"{many / 1e6:.0f} MB instead of {few / 1e6:.0f} MB"


def test_the_penalty_reaches_the_kernel_and_dropout_the_rows() -> None:
    model = build_model(config.load(SMALL, ["model.l1=0.5", "model.l2=0.25", "model.dropout=0.1"]), (10,))
    kernel, _ = model.get_weights()
    expected = 0.5 * np.abs(kernel).sum() + 0.25 * np.square(kernel).sum()
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    assert [layer.name for layer in model.layers][1].startswith("dropout")


def test_rows_of_bytes_are_refused() -> None:
    run = config.load(None, ["model.name=linear", "data.source=python_source", "data.normalization=none"])
    with pytest.raises(
        ValueError, match=r'one number each.*\(128,\) from data\.source = "python_source"\. Set data\.source'
    ):
        Regression(run, tfpar.SingleDevice())


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"linear" only, received \'cnn\'. Set model.name = "linear"'):
        Regression(config.load(SMALL, ["model.name=cnn"]), tfpar.SingleDevice())

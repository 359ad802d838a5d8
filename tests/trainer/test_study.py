"""`Trainer.study`: what was found out about a model before the first step, as a table for its user."""

from __future__ import annotations

import pytest

import tfpar
from tests.support import verdict_layers, verdict_losses, verdict_metrics, verdicts
from tests.support.verdicts import Case

pytestmark = [pytest.mark.usefixtures("logical_cpus"), pytest.mark.filterwarnings("ignore:Parts of a batch")]

GATHERED = "needs the whole batch  on the gathered batch"


def studied(case: Case, engine: str = "mirrored") -> str:
    text = str(tfpar.Trainer(case.build, verdicts.ENGINES[engine](), seed=0).study(case.data()))
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_loss_over_a_mask_is_computed_on_the_gathered_batch() -> None:
    assert f"loss masked  {GATHERED}" in studied(verdict_losses.DIVIDING["mask"])


def test_a_metric_whose_states_do_not_add_is_too() -> None:
    text = studied(verdict_metrics.METRICS["largest error"])
    assert f"metric state  {GATHERED}" in text
    assert "loss mse      a value for each row   summed, and divided once" in text


def test_a_scalar_mean_is_averaged() -> None:
    assert "averaged by rows" in studied(verdict_losses.DIVISIBLE["scalar mean"])


def test_a_refusal_names_the_layer_and_the_ways_out() -> None:
    text = " ".join(studied(verdict_layers.MIXING["mean of the batch"]).split())
    assert "refused: Every layer must compute each example alone" in text
    assert "received 'tested'" in text
    assert "batch_dependent_layers='gather'" in text


def test_a_pipeline_computes_it_on_the_gathered_batch_and_says_what_that_costs() -> None:
    case = verdict_losses.DIVIDING["mask"]
    assert f"loss masked  {GATHERED}" in studied(case, "pipeline")
    trainer = tfpar.Trainer(case.build, tfpar.Pipeline(2, 8, devices=verdicts.TWO), seed=0)
    with pytest.warns(UserWarning, match="the activations of 8 micro-batches, not of 2"):
        trainer.fit(case.data(), verbose=0)
    assert str(trainer.preview(case.data())).startswith("1f1b, forward passes first: 2 stages")


def test_one_device_computes_the_whole_batch() -> None:
    assert "one device" in studied(verdict_losses.DIVIDING["mask"], "single device")


def test_replicas_say_once_that_they_gather_the_batch() -> None:
    case = verdict_losses.DIVIDING["mask"]
    trainer = tfpar.Trainer(case.build, verdicts.ENGINES["mirrored"](), seed=0)
    with pytest.warns(UserWarning, match="The loss masked of .* on the gathered batch") as warned:
        trainer.fit(case.data(), epochs=2, verbose=0)
    assert sum("gathered batch" in str(one.message) for one in warned) == 1

"""Two workers with stages, or with stages of shards, on the devices of each: plans, predictions, traces and state."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.strategies import test_stages_of_shards as models
from tests.strategies.test_hybrid import wide
from tests.strategies.test_tensor_parallel import (
    FEATURES,
    assert_equal,
    of_features,
    of_tokens,
    perceptron,
    shard_sizes,
)
from tests.strategies.test_tensor_parallel import state as state_of_shards
from tests.strategies.test_tensor_parallel import trained as trained_in_shards
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases, pipeline_cases, small, workers
from tfpar import config, strategies
from tfpar._compat.variables.sharded_memory import is_remote
from tfpar.placement.owners import num_bytes

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
Shard = Literal["optimizer"] | None


def stages(num_microbatches: int = 2) -> tfpar.Hybrid:
    """Return one replica of two stages on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(2, num_microbatches, balance="parameters"))


def stages_of_shards(shard: Shard = None) -> tfpar.Hybrid:
    """Return one replica of two stages of two shards on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters", num_shards=2), shard=shard)


def replicas_of_shards(shard: Shard = None) -> tfpar.Strategy:
    """Return two replicas of two shards on each worker, from the settings of a configuration."""
    return strategies.from_settings(config.TensorParallel(num_shards=2, num_replicas=2, shard=shard))


def shards_by_rules() -> tfpar.Strategy:
    """Return a replica of two shards on each worker, by the rules of a configuration."""
    rules = {"up/kernel": (None, "model"), "classes/kernel": ("model", None)}
    return strategies.from_settings(config.TensorParallel(num_shards=2, layout=rules))


# --- stages


def describe() -> str:
    return stages().describe()


def test_each_worker_names_itself_and_its_grid(job: workers.Job) -> None:
    grid = "2 stages on CPU:0, CPU:1, 2 micro-batches, 1f1b"
    assert job.run(describe) == [f"Hybrid over 2 workers; this is worker {rank}, {grid}" for rank in (0, 1)]


def train_measured() -> Any:
    """Train in stages of equal time, as measured on the chief; return sizes, weights and the preview of a step."""
    trainer = tfpar.Trainer(wide, tfpar.Hybrid(tfpar.Pipeline(2, 2)), seed=0)
    trainer.fit(small.data(), verbose=0)
    preview = trainer.preview(small.data())
    assert preview.durations is not None
    sizes = [row.num_layers for row in preview.rows]
    return sizes, trainer.model.get_weights(), str(preview), preview.durations.all_reduce_seconds


def test_all_workers_have_the_stages_that_the_chief_measured_and_predict_their_all_reduce(job: workers.Job) -> None:
    results = job.run(train_measured)
    for sizes, weights, table, seconds in results:
        assert sizes == results[0][0]
        assert all(map(np.array_equal, weights, results[0][1]))
        assert len(seconds) == 2
        assert all(0 < of_stage < 1 for of_stage in seconds)
        text = " ".join(table.split())
        assert re.search(r"the optimizer and the all-reduce over 2 workers \([\d.]+ ms\) included$", text), table


def preview_of_lookups() -> str:
    case = pipeline_cases.deepened(parity_cases.CASES["embedding, sparse gradients"])
    return str(tfpar.Trainer(case.build, stages(), seed=0).preview(case.data()))


@pytest.mark.extended
def test_the_rows_of_lookups_which_are_not_measured_are_named(job: workers.Job) -> None:
    for table in job.run(preview_of_lookups):
        assert "included; the exchange of looked-up rows over workers not measured" in " ".join(table.split())


def predict_and_evaluate() -> Any:
    trainer = tfpar.Trainer(wide, stages(), seed=0)
    return trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)


def test_every_worker_has_all_predictions_and_the_logs_of_all_examples(job: workers.Job) -> None:
    trainer = tfpar.Trainer(wide, tfpar.SingleDevice(), seed=0)
    expected = trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)
    for predicted, evaluated in job.run(predict_and_evaluate):
        np.testing.assert_allclose(predicted, expected[0], rtol=1e-5, atol=1e-6)
        cases.assert_same(evaluated, expected[1], 1e-5)


def predict_before_fit() -> Any:
    """Predict a batch before the first `fit` of a model that is built in the scope."""
    with stages().scope():
        keras.utils.set_random_seed(0)
        model = wide()
    predicted = model.predict_on_batch(parity_cases.inputs(7))
    return predicted, model.fit(small.data(), verbose=0).history


@pytest.mark.extended
def test_a_model_of_the_scope_begins_with_a_prediction(job: workers.Job) -> None:
    keras.utils.set_random_seed(0)
    reference = wide()
    expected = reference.predict_on_batch(parity_cases.inputs(7)), reference.fit(small.data(), verbose=0).history
    for predicted, history in job.run(predict_before_fit):
        np.testing.assert_allclose(predicted, expected[0], rtol=1e-5, atol=1e-6)
        small.assert_same_history(history, expected[1])


def trace() -> Any:
    """Return the actions of each device of all workers in the order in which they ran, and the title of the preview."""
    strategy = stages(num_microbatches=1)
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    timeline = strategy.trace(trainer.model, trainer.build(small.data()))
    ran = [[str(span.action) for span in timeline.spans if span.device == device] for device in range(4)]
    return ran, str(trainer.preview(small.data())).splitlines()[0]


def test_a_trace_has_the_actions_of_all_workers(job: workers.Job) -> None:
    actions = [["F0.0", "B0.0"], ["F1.0", "B1.0"], ["F0.1", "B0.1"], ["F1.1", "B1.1"]]
    title = "1f1b: 2 stages on 2 devices, 1 micro-batch, on each of 2 workers"
    assert job.run(trace) == [(actions, title)] * 2


# --- shards


@pytest.fixture
def job_of_4(jobs: workers.Pool, logical_cpus: list[str]) -> workers.Job:
    """Return two started workers of four logical CPUs each."""
    return jobs.job(num_cpus=4)


def describe_shards() -> list[str]:
    return [one.describe() for one in (stages_of_shards(), replicas_of_shards(), replicas_of_shards("optimizer"))]


@pytest.mark.extended
def test_each_worker_names_its_grid_of_shards(job_of_4: workers.Job) -> None:
    stages = "2 stages of 2 shards on CPU:0, CPU:1, CPU:2, CPU:3, 2 micro-batches, 1f1b"
    shards = "2 replicas of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3)"
    sharded = f"{shards}, optimizer state sharded"
    for rank, described in enumerate(job_of_4.run(describe_shards)):
        assert described == [
            f"Hybrid over 2 workers; this is worker {rank}, {grid}" for grid in (stages, shards, sharded)
        ]


DIVIDED: dict[str, tuple[Callable[[], tfpar.Strategy], Any, Any, dict[str, Any]]] = {
    "replicas": (
        replicas_of_shards,
        models.pairs,
        of_features,
        {"up/kernel": (5, 5), "down/kernel": (5, 5), "classes/kernel": (2, 1)},
    ),
    "stages": (
        stages_of_shards,
        models.attention,
        of_tokens,
        {"table/embeddings": (6, 5), "query/kernel": (4, 2)},
    ),
    "rules": (shards_by_rules, models.pairs, of_features, {"up/kernel": (5, 5), "classes/kernel": (4, 3)}),
}


def train_sharded(name: str) -> Any:
    """Train; return logs, outputs and state, and the sharded weights."""
    strategy, build, data, _ = DIVIDED[name]
    trainer, *results = trained_in_shards(build, data(), strategy())
    return tuple(results), shard_sizes(trainer.model)


@pytest.mark.extended
@pytest.mark.parametrize("name", DIVIDED)
def test_replicas_and_stages_of_shards_train_evaluate_and_predict_as_one_device(
    job_of_4: workers.Job, name: str
) -> None:
    _, build, data, shapes = DIVIDED[name]
    with computing_in("float64"):
        _, *alone = trained_in_shards(build, data(), tfpar.SingleDevice())
        results = job_of_4.run(train_sharded, name)
    for result, shards in results:
        assert_equal(result, tuple(alone))
        assert {weight: shards[weight] for weight in shapes} == shapes


def preview_of_shards() -> str:
    return str(tfpar.Trainer(small.build_model, stages_of_shards(), seed=0).preview(small.data()))


@pytest.mark.extended
def test_the_table_of_stages_has_shards_and_the_all_reduce_over_the_workers(job_of_4: workers.Job) -> None:
    for table in job_of_4.run(preview_of_shards):
        text = " ".join(table.split())
        assert "2 stages of 2 shards on 4 devices, 2 micro-batches, on each of 2 workers" in text
        assert "all-reduce over 2 workers" in text


# --- sharded state of stages of shards


def one_weight_a_stage() -> keras.Model:
    """A model of which worker 0 owns all weights."""
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(10, "gelu", use_bias=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax", use_bias=False)(hidden))
    model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9), "sparse_categorical_crossentropy")
    return model


def scaled() -> keras.Model:
    return perceptron(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01)))


def overwritten_by_averages() -> keras.Model:
    return perceptron(
        lambda: keras.optimizers.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=3, global_clipnorm=0.01)
    )


# A model, a strategy by its `shard`, and whether averages are swapped in.
OF_WHOLE_STATE: dict[str, tuple[Callable[[], keras.Model], Callable[[Shard], tfpar.Strategy], bool]] = {
    "stages, clipped": (models.pairs, stages_of_shards, False),
    "replicas, clipped": (models.pairs, replicas_of_shards, False),
    "stages, swapped averages": (models.pairs, stages_of_shards, True),
    "built by hand": (models.pairs, stages_of_shards, True),
    "one weight a stage": (one_weight_a_stage, stages_of_shards, True),
    "scaled loss": (scaled, stages_of_shards, False),
    "overwritten by averages, norm of all": (overwritten_by_averages, stages_of_shards, False),
}


def train_with_state(name: str, shard: Shard) -> tuple[dict[str, list[float]], list[np.ndarray], float]:
    """Train; return the history, the chief's state, and the share of the optimizer's bytes held here."""
    build, strategy, swaps = OF_WHOLE_STATE[name]
    trainer = tfpar.Trainer(build, strategy(shard), seed=0)
    if name == "built by hand":
        trainer.model.optimizer.build(trainer.model.trainable_variables)
    inputs, targets = of_features()
    settings = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": (inputs, targets)}
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if swaps else []
    history = trainer.fit(inputs, targets, callbacks=callbacks, **settings).history
    slots = [slot for slot in trainer.model.optimizer.variables if len(slot.shape)]
    held = sum(num_bytes(slot) for slot in slots if not is_remote(slot))
    with trainer.strategy.engine.whole_state(trainer.model):
        arrays = state_of_shards(trainer.model) if workers.rank() == 0 else trainer.model.get_weights()
        return history, arrays, held / sum(map(num_bytes, slots))


def shares_of_state(job: workers.Job, name: str) -> list[float]:
    """Return each worker's share of sharded state, which trains as whole state."""
    with computing_in("float64"):
        whole, sharded = (job.run(train_with_state, name, shard) for shard in (None, "optimizer"))
    for (history, arrays, all_of_it), (same_history, same_arrays, _) in zip(whole, sharded, strict=True):
        small.assert_same_history(same_history, history, 1e-9)
        small.assert_same_state(same_arrays, arrays, 1e-9)
        assert all_of_it == 1
    shares = [share for *_, share in sharded]
    assert sum(shares) == pytest.approx(1)
    return shares


@pytest.mark.extended
@pytest.mark.parametrize("name", OF_WHOLE_STATE)
def test_state_over_the_workers_trains_as_whole_state_in_half_of_its_bytes(job_of_4: workers.Job, name: str) -> None:
    shares = shares_of_state(job_of_4, name)
    assert name == "one weight a stage" or all(0.3 < share < 0.7 for share in shares)


@pytest.mark.extended
def test_state_over_three_workers_trains_as_whole_state(jobs: workers.Pool) -> None:
    shares = shares_of_state(jobs.job(num_workers=3, num_cpus=4), "stages, swapped averages")
    assert all(0.1 < share < 0.6 for share in shares)

"""Two workers equal one device beyond the parity table: precision, kinds of input, averages, predictions, shards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import docstrings, input_cases, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.multi_worker_cases import EXACT, Trained, assert_same, keras_fit, plain_fit, trained
from tests.trainer import test_compute_loss as compute_loss
from tests.trainer import test_metric_entries as metric_entries
from tests.trainer import test_model_methods as model_methods
from tfpar.parity import relative_difference

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def train_under_tensorflows_own_strategy() -> tuple[list[dict[str, list[float]]], list[Any]]:
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        keras.utils.set_random_seed(workers.rank())  # the chief's weights are broadcast
        model = small.build_model()
    twice = [tfpar.fit(model, small.data(), epochs=1, verbose=0).history for _ in range(2)]
    return twice, cases.state(model)


@pytest.mark.extended
def test_drop_in_trains_a_model_of_tensorflows_own_strategy() -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    histories = [model.fit(small.data(), epochs=1, verbose=0).history for _ in range(2)]
    # TensorFlow's strategy disables the collective operations of the strategies created before it.
    with workers.started() as own:
        for result in own.run(train_under_tensorflows_own_strategy):
            assert_same(result, (histories, cases.state(model)), name="drop-in")


def train_compressed() -> Trained:
    strategy = tfpar.MultiWorker(["CPU:0"], compression="bfloat16")
    return trained(tfpar.Trainer(small.build_model, strategy, seed=0), small.data())


def test_compressed_gradients_train_nearly_the_same_on_all_workers(job: workers.Job) -> None:
    chiefs, other = job.run(train_compressed)
    expected = plain_fit()
    assert_same(chiefs, expected, 1e-2)
    assert_same(other, chiefs, 0.0)
    assert max(map(relative_difference, chiefs.state, expected.state)) > 1e-6, "they were rounded"


class Way(NamedTuple):
    """A training that workers do in another way.

    Args:
        build: The model function.
        strategy: The strategy of the workers.
        data: The global batches.
        tolerance: That of logs and state.
    """

    build: Callable[[], keras.Model]
    strategy: Callable[[], tfpar.Strategy] = cases.one_device_each
    data: Callable[[], Any] = small.data
    tolerance: float = EXACT


WAYS = {
    "compiled by XLA": Way(cases.compiled_by_xla),
    "eagerly": Way(cases.eager),
    # bfloat16 has 8 bits, and sums of halves round otherwise.
    "in mixed precision": Way(cases.mixed_precision, tolerance=5e-2),
    "own compute_loss": Way(lambda: compute_loss.build(compute_loss.SumsInTraining)),
    "averages of every step": Way(
        cases.plain_sgd, lambda: tfpar.MultiWorker(["CPU:0", "CPU:1"], sync="average"), cases.equal_parts
    ),
    # Replicas that step alone may look up rows in any way.
    "averages of rows that depend on all examples": Way(
        cases.rows_of_all,
        lambda: tfpar.MultiWorker(["CPU:0"], sync="average"),
        lambda: parity_cases._tokens(8).take(2),
    ),
}


def train_in_another_way(name: str) -> Trained:
    way = WAYS[name]
    return trained(tfpar.Trainer(way.build, way.strategy(), seed=0), way.data())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
def test_another_way_to_train_equals_one_device(job: workers.Job, name: str) -> None:
    call = job.start(train_in_another_way, name)
    expected = keras_fit(WAYS[name].data(), WAYS[name].build)
    chiefs, other = call.results()
    assert_same(chiefs, expected, WAYS[name].tolerance)
    assert_same(other, chiefs, 0.0)


def fine_tune_from_keras() -> Any:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    model.fit(small.data(), verbose=0)
    trainer = tfpar.Trainer(model, cases.one_device_each())
    first = trained(trainer, small.data())
    return first, cases.fine_tuned(model, trainer.fit), tfpar.evaluate(model, small.data(), verbose=0)


@pytest.mark.extended
def test_a_model_that_keras_trained_moves_to_the_workers_and_is_compiled_again_there(job: workers.Job) -> None:
    call = job.start(fine_tune_from_keras)
    keras.utils.set_random_seed(0)
    model = small.build_model()
    model.fit(small.data(), verbose=0)
    history = model.fit(small.data(), epochs=2, verbose=0).history
    first = Trained(history, cases.state(model))
    expected = first, cases.fine_tuned(model, model.fit), model.evaluate(small.data(), verbose=0)
    for result in call.results():
        assert_same(result, expected)


def train_on_input(name: str) -> Any:
    """Train with inputs that Python shuffles in another order on each worker: the chief's order is broadcast."""
    return cases.with_input(name, cases.one_device_each(), seed=workers.rank())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", cases.INPUTS)
@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:`shuffle=True` was passed")
def test_every_worker_takes_its_local_batch_of_batches_from_python_code(job: workers.Job, name: str) -> None:
    keras.utils.set_random_seed(0)
    case = input_cases.CASES[name]
    model = case.model()
    random.seed(0)
    history = model.fit(**case.arguments(), verbose=0).history
    for result in job.run(train_on_input, name):
        assert_same(result, (history, model.get_weights()))


def run_examples() -> dict[str, str]:
    return {f"{one.module}.{one.name}": docstrings.run(one) for one in docstrings.called(*docstrings.IN_A_JOB)}


def test_examples_in_docstrings_that_need_a_job_run_in_one(job: workers.Job) -> None:
    for result in job.run(run_examples):
        assert {name.rpartition(".")[2] for name in result} == set(docstrings.IN_A_JOB)
        assert not any(result.values()), "\n".join(result.values())


def train_averaged_every_4(steps_per_call: list[int | None], average_optimizer: bool) -> list[Trained]:
    strategy = tfpar.MultiWorker(["CPU:0"], sync="average", every=4, average_optimizer=average_optimizer)
    reused = cases.Reused(strategy)
    return [trained(reused.initial(), cases.equal_parts(), steps_per_call=steps) for steps in steps_per_call]


@pytest.mark.extended
def test_averaging_every_4_steps_whatever_the_steps_of_a_call(job: workers.Job) -> None:
    call = job.start(train_averaged_every_4, [None, 1, 4, 1000], True)
    expected = cases.averaged_by_hand(average_optimizer=True)
    chiefs, others = call.results()
    for result in (*chiefs, *others):
        assert_same(result.state, expected)
        assert_same(result.history, chiefs[0].history)


def test_averaging_without_the_optimizers_moments(job: workers.Job) -> None:
    call = job.start(train_averaged_every_4, [4], False)
    expected = cases.averaged_by_hand(average_optimizer=False)
    (chief,), (other,) = call.results()
    assert_same(chief.state, expected)
    assert_same(other.state[:4], expected[:4])
    assert relative_difference(other.state[-1], expected[-1]) > EXACT, "each keeps its own"


# --- methods of the model and its class


def compute_own_metrics() -> Any:
    """Return the results of a model's own `compute_metrics`."""
    build = metric_entries.build(metric_entries.Derived)
    return metric_entries.values_of(tfpar.Trainer(build, cases.one_device_each(), seed=0))


@pytest.mark.extended
def test_an_overridden_method_for_metrics_equals_one_device(job: workers.Job) -> None:
    call = job.start(compute_own_metrics)
    keras.utils.set_random_seed(0)
    expected = metric_entries.values_of(metric_entries.build(metric_entries.Derived)())
    for result in call.results():
        assert_same(result, expected)


def call_methods_in_callbacks() -> Any:
    return model_methods.trained(tfpar.Trainer(small.build_model, cases.two_devices_each(), seed=0))


@pytest.mark.extended
def test_methods_of_the_model_in_callbacks_equal_one_device(job: workers.Job) -> None:
    expected = model_methods.of_keras()
    for result in job.run(call_methods_in_callbacks):
        model_methods.assert_equal(result, expected)


def call_methods_in_a_scope() -> Any:
    """Build a model in the scope; the chief alone predicts before the first `fit`, and in it."""
    with cases.one_device_each().scope():
        model = small.initial_model()
        outputs = [model.predict(parity_cases.inputs(7), verbose=0)] if workers.rank() == 0 else []
        history = model.fit(small.data(), verbose=0).history
        outputs.append(model.predict(parity_cases.inputs(7), verbose=0))
    return history, outputs


def test_a_model_in_the_scope_trains_and_predicts_by_its_own_methods(job: workers.Job) -> None:
    model = small.initial_model()
    before = model.predict(parity_cases.inputs(7), verbose=0)
    history = model.fit(small.data(), verbose=0).history
    after = model.predict(parity_cases.inputs(7), verbose=0)
    for rank, result in enumerate(job.run(call_methods_in_a_scope)):
        assert_same(result, (history, [before, after][rank:]))


def predict_on_worker_1() -> Any:
    model = cases.initial().model
    return model.predict(parity_cases.inputs(7), batch_size=3, verbose=0) if workers.rank() == 1 else None


def test_a_worker_may_predict_alone(job: workers.Job) -> None:
    keras.utils.set_random_seed(0)
    expected = small.build_model().predict(parity_cases.inputs(7), verbose=0)
    assert_same(job.run(predict_on_worker_1)[1], expected)


def train_on_batch(model: keras.Model) -> tuple[Any, Any]:
    return model.train_on_batch(parity_cases.inputs(4), parity_cases.labels(4)), cases.state(model)


def train_on_batch_of_workers() -> tuple[Any, Any]:
    return train_on_batch(cases.initial().model)


def test_train_on_batch_trains_one_step_on_all_workers(job: workers.Job) -> None:
    expected = train_on_batch(small.initial_model())
    for result in job.run(train_on_batch_of_workers):
        assert_same(result, expected)


def call_keras_in_the_model_function(name: str) -> None:
    def build() -> Any:
        model = small.build_model()
        getattr(model, name)(small.data(), verbose=0)
        return model

    tfpar.Trainer(build, cases.one_device_each(), seed=0)


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_a_model_function_that_calls_methods_of_keras_is_refused(job: workers.Job, name: str) -> None:
    for result in job.outcomes(call_keras_in_the_model_function, name):
        assert f"A model function cannot call {name} in a job of several workers" in result.message


# --- evaluate, predict, and data that workers read apart


def evaluate_and_predict() -> Any:
    return cases.evaluate_and_predict(cases.two_devices_each())


def test_evaluate_and_predict_equal_one_device(job: workers.Job) -> None:
    call = job.start(evaluate_and_predict)
    expected = cases.evaluate_and_predict(None)
    for result in call.results():
        assert_same(result, expected)
        for key, output in expected["predict many outputs"].items():
            assert result["predict many outputs"][key].dtype == output.dtype, key


def results_of_metrics() -> Any:
    """Return logs and results of the metrics after each epoch and after an evaluation."""
    trainer = cases.initial()
    pairs = []

    def note(logs: dict[str, float]) -> None:
        results = {name: float(value) for name, value in trainer.model.get_metrics_result().items()}
        pairs.append((dict(logs), results))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note(logs))
    trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[callback])
    note(trainer.evaluate(small.data(), verbose=0, return_dict=True))
    return pairs


@pytest.mark.extended
def test_results_of_metrics_in_callbacks_are_those_of_all_workers(job: workers.Job) -> None:
    for result in job.run(results_of_metrics):
        for logs, results in result:
            assert_same(logs, results)


SHARDED_LAYOUTS: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": cases.one_device_each,
    "two devices": cases.two_devices_each,
    "stages": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters")),
}
SHARDED_IN_CI = (("by file, worker 1 ends first", "one device"),)


def train_in_shards(kind: str, layout: str) -> Any:
    trainer = tfpar.Trainer(cases.sharded_model(kind), SHARDED_LAYOUTS[layout](), seed=0)
    return cases.with_shards(kind, trainer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        row if row in SHARDED_IN_CI else pytest.param(*row, marks=pytest.mark.extended)
        for row in itertools.product(cases.SHARDED, SHARDED_LAYOUTS)
    ],
)
def test_shards_that_workers_read_apart_train_as_on_one_device(job: workers.Job, kind: str, layout: str) -> None:
    call = job.start(train_in_shards, kind, layout)
    trainer = tfpar.Trainer(cases.sharded_model(kind), tfpar.SingleDevice(), seed=0)
    expected = cases.with_shards(kind, trainer)
    for result in call.results():
        assert_same(result, expected)

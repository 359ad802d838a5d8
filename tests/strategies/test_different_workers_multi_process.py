"""Workers that differ in options, models, data or calls: all say so before they wait for ever, and can train on."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases, small, workers
from tests.support.multi_worker_cases import Trained, assert_same, plain_fit, trained
from tfpar.workers import preflight

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]
EQUAL = r"All workers must be equal, and worker 1 \(127.0.0.1:"


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def messages(outcomes: list[Any]) -> list[str]:
    """Return the message of each worker's error."""
    for outcome in outcomes:
        assert isinstance(outcome, workers.Raised), outcome
    return [outcome.message for outcome in outcomes]


# --- strategies and models


def create(*strategies: str) -> None:
    """Create a strategy by rank."""
    eval(strategies[workers.rank()], {"tfpar": tfpar})


OPTIONS = {
    "strategies": (
        "tfpar.MultiWorker(shard='optimizer')",
        "tfpar.Hybrid(tfpar.Pipeline(1, num_microbatches=2), shard='optimizer')",
        "creates Hybrid(shard='optimizer'), the chief MultiWorker(shard='optimizer').",
    ),
    "compression": (
        "tfpar.MultiWorker(compression='bfloat16')",
        "tfpar.MultiWorker()",
        "differs from the chief in compression ('None' instead of 'bfloat16').",
    ),
    "shares": (
        "tfpar.MultiWorker(batch_shares=[3, 1])",
        "tfpar.MultiWorker()",
        "differs from the chief in batch_shares ('None' instead of '(3, 1)').",
    ),
    "grids": (
        "tfpar.Hybrid(tfpar.Pipeline(2, 2), 1)",
        "tfpar.Hybrid(tfpar.Pipeline(1, 2), 2)",
        "grid ('2 x 1 stages on 2 devices' instead of '1 x 2 stages on 2 devices')",
    ),
    "rules": (
        "tfpar.Hybrid(tfpar.Pipeline(1, 1, num_shards=2, layout={'layer_0': (None, 'model')}))",
        "tfpar.Hybrid(tfpar.Pipeline(1, 1, num_shards=2, layout={'layer_1': (None, 'model')}))",
        "in layout (\"{'layer_1': (None, 'model')}\" instead of \"{'layer_0': (None, 'model')}",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("chiefs", "others", "sentence"), OPTIONS.values(), ids=OPTIONS)
def test_other_options_are_an_error_on_all(job: workers.Job, chiefs: str, others: str, sentence: str) -> None:
    for message in messages(job.outcomes(create, chiefs, others)):
        assert "worker 1 (127.0.0.1:" in message
        assert sentence in message


@pytest.mark.extended
def test_a_worker_that_waits_for_the_others_devices_is_refused() -> None:
    with workers.started() as own:
        for message in messages(own.outcomes(create, "tfpar.MultiWorker(shard='weights')", "tfpar.MultiWorker()")):
            assert "creates MultiWorker, the chief MultiWorker(shard='weights')." in message


def create_many() -> list[str]:
    """Create strategies in quick succession, each of which connects to that of the other worker."""
    return [tfpar.MultiWorker(devices).describe() for devices in [None, ["CPU:0"]] * 10]


@pytest.mark.extended
def test_strategies_are_created_one_after_another(job: workers.Job) -> None:
    for rank, descriptions in enumerate(job.run(create_many)):
        assert len(descriptions) == 20
        assert descriptions[0] == f"MultiWorker over 2 workers, 4 replicas; this is worker {rank} on CPU:0, CPU:1"
        assert descriptions[1] == f"MultiWorker over 2 workers, 2 replicas; this is worker {rank} on CPU:0"
        # TensorFlow says this where it takes the collectives of the strategies before away.
        assert "Enabling collective ops after program startup" not in job.output(rank)


# --- weights


def train_from_other_weights() -> Any:
    """Begin with other weights on each worker, to evaluate, to predict and to train."""
    trainer = tfpar.Trainer(small.build_model, cases.one_device_each(), seed=workers.rank())
    before = trainer.evaluate(small.data(), verbose=0), trainer.predict(parity_cases.inputs(7), verbose=0)
    return before, trained(trainer, small.data(), callbacks=[tfpar.ReplicaCheck(every_steps=3)])


def test_the_chiefs_weights_count(job: workers.Job) -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    before = model.evaluate(small.data(), verbose=0), model.predict(parity_cases.inputs(7), verbose=0)
    for result in job.run(train_from_other_weights):
        assert_same(result, (before, plain_fit()))


# --- data


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        call()
    return str(raised.value)


def fit_other_orders() -> dict[str, str]:
    """Read the same examples in other orders on each worker; return the errors."""
    errors = {
        name: error_of(functools.partial(cases.initial().fit, dataset, verbose=0))
        for name, dataset in cases.other_orders(workers.rank()).items()
    }
    own, trainer = cases.other_tail(workers.rank()), cases.initial()
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: trainer.fit(own, verbose=0, steps_per_call=5),
        "validation": lambda: trainer.fit(small.data(), validation_data=own, verbose=0),
        "evaluate": lambda: trainer.evaluate(own, verbose=0),
        "predict": lambda: trainer.predict(own.map(lambda x, _: x), verbose=0),
    }
    return errors | {name: error_of(call) for name, call in calls.items()}


def test_workers_that_read_in_other_orders_are_refused(job: workers.Job) -> None:
    """They trained on some examples twice and left out others."""
    for errors in job.run(fit_other_orders):
        for name, message in errors.items():
            step = "4 of the epoch" if name in ("fit", "validation", "evaluate", "predict") else ""
            assert f"worker 1 has read another batch than the chief in step {step}" in message, name


def warnings_of_drawn_batches() -> dict[str, list[str]]:
    """Return the warnings about batches that random operations change in other ways, or alike, on each worker."""
    warned = {}
    for name, dataset in cases.drawn_batches(workers.rank()).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cases.initial().fit(dataset, verbose=0, epochs=2, steps_per_call=2)
        warned[name] = [str(warning.message) for warning in caught if "global batches" in str(warning.message)]
    return warned


def test_random_numbers_may_differ_and_a_warning_says_where_the_order_is_unknown(job: workers.Job) -> None:
    chiefs, other = job.run(warnings_of_drawn_batches)
    assert chiefs.pop("random targets") == [cases.UNKNOWN_ORDER]
    assert not any([*chiefs.values(), *other.values()])


def predict_for_other_data() -> Any:
    """Each worker predicts for other arrays, and for other batches of a generator; then all for the same."""
    trainer, inputs = cases.initial(), np.zeros([16, parity_cases.NUM_FEATURES])
    own = inputs[: 16 - 8 * workers.rank()]
    of_arrays = error_of(lambda: trainer.predict(own, batch_size=8, verbose=0))
    batches = ((inputs[:8] + workers.rank(),) for _ in range(2))
    of_generator = error_of(lambda: trainer.predict(batches, verbose=0))
    return of_arrays, of_generator, trainer.predict(inputs, batch_size=8, verbose=0)


def test_other_data_to_predict_on_a_worker_are_refused(job: workers.Job) -> None:
    results = job.run(predict_for_other_data)
    for of_arrays, of_generator, outputs in results:
        assert "the data ('1 steps with batches of 8 examples' instead of '2 steps with batches of 8" in of_arrays
        assert OTHER_BATCH in of_generator
        np.testing.assert_array_equal(outputs, results[0][-1])


# --- errors of all, after which they train on


def create_with_other_versions() -> None:
    original = preflight.versions
    if workers.rank() == 1:
        preflight.versions = lambda: {**original(), "Keras' version": "2.0"}
    try:
        tfpar.MultiWorker(["CPU:0"])
    finally:
        preflight.versions = original


def train_other_models() -> None:
    build = cases.of_width(8 + workers.rank())
    tfpar.Trainer(build, cases.one_device_each(), seed=0).fit(small.data(), verbose=0)


def lower_the_rate_of_worker_1() -> None:
    """Lower the learning rate, with sharded state."""
    trainer = tfpar.Trainer(small.build_model, tfpar.MultiWorker(["CPU:0"], shard="optimizer"), seed=0)

    def lower(epoch: int, logs: Any) -> None:
        trainer.model.optimizer.learning_rate = 0.1 / (1 + workers.rank())

    trainer.fit(small.data(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lower)])


def move_the_statistics_of_worker_1() -> None:
    """Change moving statistics after the training."""
    trainer = tfpar.Trainer(cases.normalized, cases.one_device_each(), seed=0)

    def move(logs: Any) -> None:
        trainer.model.layers[1].moving_mean.assign(np.full(5, float(workers.rank())))

    trainer.fit(small.data(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_end=move)])


def call_with(verb: str, batches: list[Any] | tf.data.Dataset) -> None:
    """Call a method of the trainer; `predict` without targets."""
    if isinstance(batches, tf.data.Dataset):
        data: Any = batches.map(lambda features, _: features) if verb == "predict" else batches
    else:
        data = ((features,) if verb == "predict" else (features, labels) for features, labels in batches)
    getattr(cases.initial(), verb)(data, verbose=0)


def call_with_slices(verb: str) -> None:
    rank = workers.rank()
    arrays = parity_cases.inputs(32)[rank::2], parity_cases.labels(32)[rank::2]
    call_with(verb, tf.data.Dataset.from_tensor_slices(arrays).batch(8))


def call_with_parts(verb: str) -> None:
    """Each worker reads its part of the data, as a script of `tf.distribute` without automatic sharding."""
    call_with(verb, small.data().unbatch().shard(2, workers.rank()).batch(4))


def call_with_data_that_end_early(verb: str) -> None:
    """The length of a generator is unknown: the others waited without end for the part of worker 1 of the next step."""
    call_with(verb, list(small.data().take(5 - 2 * workers.rank()).as_numpy_iterator()))


def call_with_files_in_another_order(verb: str) -> None:
    """Each worker lists the files in its own order, as `glob` does."""
    names = [f"/data/{number}" for number in range(4)][:: 1 - 2 * workers.rank()]
    shards = tfpar.data.by_file(names, lambda _: small.data().unbatch().take(8), global_batch_size=8, num_shards=4)
    getattr(cases.initial(), verb)(shards, verbose=0)


def call_other_methods(verb: str) -> None:
    """The chief calls a method that the other worker, which trains, does not."""
    getattr(cases.initial(), verb if workers.rank() == 0 else "fit")(small.data())


def evaluate_on_the_chief_alone() -> None:
    callbacks = []
    if workers.rank() == 0:
        evaluate = functools.partial(cases.initial().evaluate, small.data(), verbose=0)
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: evaluate()))
    cases.initial().fit(small.data(), verbose=0, callbacks=callbacks)


OTHER_BATCH = "worker 1 has read another batch than the chief in step 1"
ENDS_EARLY = rf"^{EQUAL}.*the end of the data \('3 batches in an epoch'"
OTHER_FILES = r"the files or examples of its shards, or their order \('3' instead of '0'\)"
ERRORS: list[tuple[Callable[..., None], tuple[str, ...], str]] = [
    (create_with_other_versions, (), rf"^{EQUAL}.*Keras' version \('2.0' instead of '{keras.__version__}'\)"),
    (train_other_models, (), rf"^{EQUAL}.*the model \('weights/sequential/dense/kernel"),
    (
        lower_the_rate_of_worker_1,
        (),
        "^All workers must train with the same learning rate, and it is 0.*0.075 in the mean",
    ),
    (move_the_statistics_of_worker_1, (), "^All workers must end with equal weights"),
    (call_with_slices, ("fit",), OTHER_BATCH),
    *((call_with_parts, (verb,), OTHER_BATCH) for verb in ("fit", "evaluate", "predict")),
    *((call_with_data_that_end_early, (verb,), ENDS_EARLY) for verb in ("fit", "evaluate", "predict")),
    *((call_with_files_in_another_order, (verb,), OTHER_FILES) for verb in ("fit", "predict")),
    *(
        (call_other_methods, (verb,), f"worker 1 calls fit where the chief calls {verb}. Call each on every worker")
        for verb in ("evaluate", "predict", "build")
    ),
    (evaluate_on_the_chief_alone, (), "worker 1 calls none where the chief calls evaluate. Call each on every worker"),
]


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("function", "arguments", "sentence"), ERRORS, ids=["_".join([row[0].__name__, *row[1]]) for row in ERRORS]
)
def test_what_workers_must_do_alike_is_an_error_on_all(
    job: workers.Job, function: Callable[..., None], arguments: tuple[str, ...], sentence: str
) -> None:
    for message in messages(job.outcomes(function, *arguments)):
        assert re.search(sentence, message, re.DOTALL), message


def train_small() -> Trained:
    return trained(cases.initial(), small.data())


def test_after_their_errors_all_train_together(job: workers.Job) -> None:
    for result in job.run(train_small):
        assert_same(result, plain_fit())

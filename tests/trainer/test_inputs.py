"""`fit`, `evaluate` and `predict` take all inputs of Keras, in the same order, with the same results and warnings."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
import tensorflow as tf

import tfpar
from tests.support import input_cases as cases
from tests.support import small
from tests.support.extent import sampled
from tests.support.input_cases import BATCH_SIZE, CASES, FEATURES, LABELS, NUM_BATCHES, Rows

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

STRATEGIES = {**small.STRATEGIES, "pipeline": lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"])}
STRATEGIES_AND_SHARDS = {**STRATEGIES, "tensor_parallel": lambda: tfpar.TensorParallel(2)}
by_strategy = pytest.mark.parametrize("strategy", small.STRATEGIES)
by_any_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# What micro-batches cut in another way; the batches reach the stages as they reach one device.
IN_PIPELINES = (
    *("PyDataset, two threads", "generator", "pandas", "dataset, too many steps", "None in a list"),
    *("sparse dataset", "scipy, split", "sparse, own layer", "ragged, own layer", "None first in a dict"),
)
# What differs from one device where a batch is cut; the rest is the same code for both.
ON_REPLICAS = (
    *("PyDataset", "PyDataset with weights", "PyDataset, two threads, steps", "PyDataset that shuffles itself"),
    *("endless PyDataset, two threads", "PyDataset validates", "generator", "generator, too many steps", "DataLoader"),
    *("pandas, split", "dataset, too many steps", "dataset of unknown length, steps", "too many validation steps"),
    *("sparse", "sparse dataset", "scipy, split", "ragged", "ragged dataset", "ragged generator"),
    *("sparse, own layer", "ragged, own layer"),
    *("None in a list", "None in a dict", "None in a dataset", "None in a generator"),
)


@functools.cache
def trainer_of(model: Callable[[], keras.Model], strategy: str) -> tuple[tfpar.Trainer, small.Again]:
    """One compiled model for all tests of a kind of input, with what sets it back."""
    trainer = tfpar.Trainer(model, STRATEGIES_AND_SHARDS[strategy](), seed=0)
    return trainer, _built(trainer.model, model, trainer.fit)


@functools.cache
def keras_of(model: Callable[[], keras.Model]) -> tuple[keras.Model, small.Again]:
    keras.utils.set_random_seed(0)
    alone = model()
    return alone, _built(alone, model, alone.fit)


def _built(model: keras.Model, build: Callable[[], keras.Model], fit: Callable[..., Any]) -> small.Again:
    if not model.built:
        fit(cases.dataset(cases.tokens(), LABELS).take(1), verbose=0)
        keras.utils.set_random_seed(0)
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=value.shape) for value in model.get_weights()])
        for variable in model.optimizer.variables[2:]:
            variable.assign(np.zeros(variable.shape))
    return small.Again(model)


def ran_out(caught: list[warnings.WarningMessage]) -> int:
    return sum("ran out of data" in str(warning.message) for warning in caught)


def fitted(fit: Callable[..., Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], int]:
    cases.seed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return fit(**arguments, verbose=0).history, ran_out(caught)


@functools.cache
def expected(name: str) -> tuple[dict[str, Any], list[np.ndarray], Any]:
    """What Keras alone does with a case: its history, its weights, and how it calls a PyDataset."""
    model, again = keras_of(CASES[name].model)
    again.reset()
    arguments = CASES[name].arguments()
    history, _ = fitted(model.fit, arguments)
    return history, model.get_weights(), getattr(arguments["x"], "calls", None)


FITS = [
    *(("single_device", name) for name in CASES if CASES[name].keras_takes),
    *(("mirrored", name) for name in ON_REPLICAS),
    *(("pipeline", name) for name in IN_PIPELINES),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("strategy", "name"), sampled(FITS, of_ci=FITS[::2]))
def test_fit_takes_it_as_keras_does(strategy: str, name: str) -> None:
    if name in cases.NEED_TORCH and not cases.HAS_TORCH:
        pytest.skip("torch is not installed")
    expected_history, expected_weights, calls = expected(name)
    trainer, again = trainer_of(CASES[name].model, strategy)
    again.reset()
    arguments = CASES[name].arguments()
    history, num_warnings = fitted(trainer.fit, arguments)
    small.assert_same_history(history, expected_history)
    small.assert_same_state(trainer.model.get_weights(), expected_weights, 1e-5)
    assert num_warnings == cases.WARNINGS.get(name, 0), "Keras' warning, where the user asked for more than there is"
    if calls is not None and "steps_per_epoch" not in arguments and arguments["x"].workers < 2:
        assert arguments["x"].calls == calls, "the PyDataset is called as often as by Keras, in the same order"


@pytest.mark.few(1)
@by_strategy
def test_evaluate_takes_it_as_keras_does(strategy: str) -> None:
    (trainer, again), (model, keras_again) = (trainer_of(cases.dense_model, strategy), keras_of(cases.dense_model))
    for state in (again, keras_again):
        state.reset()
    for make in (Rows, lambda: Rows(workers=2), cases.generate, cases.frame):
        arguments: dict[str, Any] = {"y": LABELS} if make is cases.frame else {}
        found, wanted = (one.evaluate(make(), verbose=0, **arguments) for one in (trainer, model))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    rows, keras_rows = Rows(), Rows()
    found, wanted = (one.evaluate(x, verbose=0, steps=2) for one, x in ((trainer, rows), (model, keras_rows)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.few(1)
@by_strategy
def test_predict_takes_it_as_keras_does(strategy: str) -> None:
    kinds: dict[Callable[[], keras.Model], list[Callable[[], Any]]] = {
        cases.dense_model: [Rows, cases.generate, cases.frame],
        cases.sparse_model: [cases.sparse, lambda: scipy.sparse.coo_matrix(cases.MOSTLY_ZERO)],
        cases.ragged_model: [cases.tokens],
        cases.optional_model: [lambda: [FEATURES, None], cases.with_none],
    }
    for kind in sampled(kinds, of_ci=[cases.dense_model, cases.sparse_model]):
        (trainer, again), (model, keras_again) = trainer_of(kind, strategy), keras_of(kind)
        again.reset()
        keras_again.reset()
        for make in kinds[kind]:
            x = make()
            found = trainer.predict(x, verbose=0, batch_size=BATCH_SIZE)
            dense = tf.sparse.from_dense(cases.MOSTLY_ZERO) if isinstance(x, scipy.sparse.coo_matrix) else make()
            np.testing.assert_allclose(found, model.predict(dense, verbose=0, batch_size=BATCH_SIZE), rtol=1e-5)


@by_strategy
def test_predict_joins_outputs_of_different_sizes_as_keras_does(strategy: str) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def batches() -> tf.data.Dataset:
        sizes = tf.data.Dataset.from_tensor_slices([3, 5])
        return sizes.map(lambda size: tf.ones([4, size, 2]))

    trainer = tfpar.Trainer(build, STRATEGIES[strategy](), seed=0)
    outputs = trainer.predict(batches(), verbose=0)
    assert isinstance(outputs, tf.RaggedTensor)
    assert outputs.row_lengths().numpy().tolist() == [3] * 4 + [5] * 4


@by_any_strategy
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)),
        lambda: tf.data.Dataset.from_tensor_slices((FEATURES, LABELS[:, None])),
        lambda: ((FEATURES[row], LABELS[row : row + 1]) for row in range(3)),
    ],
    ids=["scalar labels", "labels of one value", "generator"],
)
def test_a_dataset_that_is_not_batched_says_so(strategy: str, make: Callable[[], Any]) -> None:
    trainer, _ = trainer_of(cases.dense_model, strategy)
    for method in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match=r"must be a batch.* Batch it with dataset\.batch\(global batch\)"):
            method(make(), verbose=0)


@by_any_strategy
@pytest.mark.parametrize("as_arrays", [False, True])
def test_targets_of_strings_are_refused(strategy: str, as_arrays: bool) -> None:
    trainer, _ = trainer_of(cases.dense_model, strategy)
    names = np.array(["cat", "dog"])[np.arange(len(FEATURES)) % 2]
    given = (FEATURES, names) if as_arrays else (tf.data.Dataset.from_tensors((FEATURES, names)),)
    for method in (trainer.fit, trainer.evaluate):
        with pytest.raises(
            ValueError, match=r"must be numbers, .* received strings\. Encode .*keras\.layers\.StringLookup"
        ):
            method(*given, verbose=0)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "targets next to a generator": (lambda: {"x": cases.generate(), "y": LABELS}, "`y` should not be passed"),
    "weights next to a PyDataset": (
        lambda: {"x": Rows(), "sample_weight": WEIGHTS},
        "`sample_weights` should not be passed",
    ),
    "class weights with a generator": (lambda: {"x": cases.generate(), "class_weight": {0: 1.0}}, "not supported"),
    "class weights with weights": (
        lambda: {"x": Rows((FEATURES, LABELS, WEIGHTS)), "class_weight": {0: 1.0}},
        "`class_weight` and `sample_weight`",
    ),
    "a split of a generator": (
        lambda: {"x": cases.generate(), "validation_split": 0.2},
        "needs arrays, but x is a dataset",
    ),
    "an empty generator": (lambda: {"x": cases.generate(times=0)}, "at least one batch"),
    "a generator of arrays": (lambda: {"x": (FEATURES for _ in range(2))}, "must return a tuple"),
    "targets next to a dataset": (
        lambda: {"x": cases.dataset(FEATURES, LABELS), "y": LABELS},
        "Targets and weights are part of a dataset",
    ),
    "a dataset of tf.distribute": (
        lambda: {
            "x": tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(cases.dataset(FEATURES))
        },
        "Pass the tf.data.Dataset that it was made from",
    ),
    "None that comes and goes": (
        lambda: {"x": iter_of([((FEATURES[:8], None), LABELS[:8]), ((FEATURES[:8], FEATURES[:8]), LABELS[:8])])},
        "None in the same places",
    ),
}
WEIGHTS = cases.WEIGHTS


def iter_of(batches: list[Any]) -> Any:
    yield from batches


@pytest.mark.parametrize("name", REFUSED)
def test_incompatible_arguments_are_refused_before_the_first_step(name: str) -> None:
    arguments, message = REFUSED[name]
    trainer, again = trainer_of(cases.dense_model, "single_device")
    again.reset()
    with pytest.raises(ValueError, match=message):
        trainer.fit(**arguments(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize("column", [pa.array(LABELS), pa.chunked_array([LABELS]), pa.array(LABELS).to_pylist])
def test_arrow_columns_are_arrays(column: Any) -> None:
    trainer, _ = trainer_of(cases.dense_model, "single_device")
    if callable(column):
        with pytest.raises(TypeError, match=r"y\[0\] must be an array .* Convert it with numpy.asarray"):
            trainer.evaluate(FEATURES, column(), verbose=0)
    else:
        assert trainer.evaluate(FEATURES, column, verbose=0) == trainer.evaluate(FEATURES, LABELS, verbose=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES_AND_SHARDS) - {"pipeline"}))
@pytest.mark.parametrize("comes", [True, False])
def test_an_optional_input_comes_and_goes(strategy: str, comes: bool) -> None:
    (trainer, again), (model, keras_again) = trainer_of(cases.optional_model, strategy), keras_of(cases.optional_model)
    kinds = [[FEATURES, None], [FEATURES, FEATURES * 0.5]]
    losses = []
    for one, state in ((model, keras_again), (trainer, again)):
        state.reset()
        for x in kinds if comes else kinds[::-1]:
            if one is model:
                model.make_train_function(force=True)  # Keras 3.15 runs what it traced first
            history = one.fit(x, LABELS, batch_size=BATCH_SIZE, shuffle=False, verbose=0).history
            losses.append(history["loss"])
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("comes", [True, False])
def test_a_pipeline_keeps_to_the_optional_inputs_of_its_first_batch(comes: bool) -> None:
    trainer = tfpar.Trainer(cases.optional_model, STRATEGIES_AND_SHARDS["pipeline"](), seed=0)
    kinds = [[FEATURES, None], [FEATURES, FEATURES * 0.5]]
    first, second = kinds if comes else kinds[::-1]
    trainer.fit(first, LABELS, verbose=0)
    with pytest.raises(ValueError, match="must have the same optional inputs"):
        trainer.fit(second, LABELS, verbose=0)


def test_shuffling_within_batches_keeps_the_batches() -> None:
    dataset = tfpar.data.from_arrays(np.arange(11), batch_size=4, shuffle="batch", seed=0)
    passes = [[batch.numpy() for batch in dataset] for _ in range(2)]
    for batches in passes:
        assert [sorted(batch.tolist()) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert any((one != other).any() for one, other in zip(*passes, strict=True)), "another order in every epoch"


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_every_kind_have_the_order_of_dense_rows(kind: str, shuffle: bool) -> None:
    rows = np.arange(1, 12)
    values = (
        tf.sparse.from_dense(rows[:, None]) if kind == "sparse" else tf.RaggedTensor.from_row_lengths(rows, [1] * 11)
    )
    dataset = tfpar.data.from_arrays(values, rows, batch_size=4, shuffle=shuffle, seed=3)
    assert int(dataset.cardinality()) == 3
    orders = []
    for _ in range(2):
        for batch, labels in dataset:
            dense = tf.sparse.to_dense(batch) if kind == "sparse" else batch.to_tensor()
            np.testing.assert_array_equal(dense[:, 0], labels)
        orders.append(np.concatenate([labels for _, labels in dataset]).tolist())
        assert sorted(orders[-1]) == rows.tolist()
    assert (orders[0] == orders[1]) is not shuffle


# --- positions: resuming, and looking at the first batch


@pytest.mark.parametrize("shuffles_itself", [False, True])
def test_a_shuffled_pydataset_resumes_in_the_middle_of_an_epoch(tmp_path: Path, shuffles_itself: bool) -> None:
    def run(folder: str, stop_at: int | None) -> tuple[dict[str, Any], list[np.ndarray]]:
        trainer, again = trainer_of(cases.dense_model, "single_device")
        again.reset()
        cases.seed()
        checkpoints = tfpar.Checkpoints(tmp_path / folder, every_seconds=1000)
        callbacks = [small_stop(trainer, stop_at)] if stop_at else []
        rows = Rows(shuffles_itself=shuffles_itself)
        fit = trainer.fit(rows, epochs=3, verbose=0, callbacks=callbacks, checkpoints=checkpoints)
        return fit.history, trainer.model.get_weights()

    history, weights = run("whole", None)
    run("parts", 8)
    resumed_history, resumed = run("parts", None)
    small.assert_same_state(resumed, weights)
    assert resumed_history["loss"][-1] == history["loss"][-1]


class small_stop(keras.callbacks.Callback):  # noqa: N801
    """Interrupt a trainer at a step."""

    single_batches = True

    def __init__(self, trainer: tfpar.Trainer, at_step: int | None) -> None:
        super().__init__()
        self._trainer, self._at_step = trainer, at_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == self._at_step:
            self._trainer.interrupt()


def test_a_generator_resumes_by_skipping_used_batches_with_a_warning(tmp_path: Path) -> None:
    trainer, again = trainer_of(cases.dense_model, "single_device")

    def run(folder: str, epochs: int) -> list[np.ndarray]:
        checkpoints = tfpar.Checkpoints(tmp_path / folder, every_seconds=1000)
        again.reset()
        trainer.fit(cases.generate(times=2), steps_per_epoch=3, epochs=epochs, verbose=0, checkpoints=checkpoints)
        return trainer.model.get_weights()

    whole = run("whole", 3)
    run("parts", 1)
    with pytest.warns(UserWarning, match="first 3 batches are read and skipped"):
        small.assert_same_state(run("parts", 3), whole)


@pytest.mark.parametrize("make", [cases.generate, lambda: Rows(shuffles_itself=True)], ids=["generator", "PyDataset"])
def test_looking_at_the_first_batch_changes_nothing(make: Callable[[], Any]) -> None:
    trainer, again = trainer_of(cases.dense_model, "single_device")
    losses = []
    for looks in (False, True):
        again.reset()
        cases.seed()
        x = make()
        if looks:
            assert len(trainer.build(x)[1]) == BATCH_SIZE
        losses.append(trainer.fit(x, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_a_callback_changes_a_dataset_before_its_epoch_begins() -> None:
    class Level(keras.callbacks.Callback):
        def __init__(self, rows: Rows) -> None:
            super().__init__()
            self._rows = rows

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._rows.calls.append(f"epoch {epoch}")

    trainer, _ = trainer_of(cases.dense_model, "single_device")
    rows = Rows()
    trainer.fit(rows, epochs=2, shuffle=False, verbose=0, callbacks=[Level(rows)])
    one = ["begin", *range(NUM_BATCHES), "end"]
    assert rows.calls == [0, 1, "end", "epoch 0", *one, "epoch 1", *one]


@pytest.mark.extended
def test_the_threads_of_a_pydataset_end_with_the_training() -> None:
    trainer, _ = trainer_of(cases.dense_model, "single_device")
    before = set(threading.enumerate())
    trainer.fit(Rows(endless=True, workers=2), steps_per_epoch=3, verbose=0)
    assert not [thread for thread in threading.enumerate() if thread not in before and "Worker_" in thread.name]

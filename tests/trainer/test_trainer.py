"""Keras' methods of the trainer: fit, evaluate, predict and save as on one device; bad input is refused."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

NUM_EXAMPLES = 37
VERBS = ("fit", "evaluate", "predict")
by_strategy = pytest.mark.parametrize("strategy", small.STRATEGIES)


def inputs() -> np.ndarray:
    return parity_cases.inputs(NUM_EXAMPLES)


def labels() -> np.ndarray:
    return parity_cases.labels(NUM_EXAMPLES)


class Twins:
    """A trainer and its model's twin under Keras alone, set back for every test."""

    def __init__(self, strategy: str) -> None:
        self.trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy](), seed=0)
        keras.utils.set_random_seed(0)
        self.keras = small.build_model()
        self._again = [small.Again(self.trainer.model), small.Again(self.keras)]

    def reset(self) -> Twins:
        for again in self._again:
            again.reset()
        return self

    def assert_same_fit(self, *arguments: Any, same_iterations: bool = True, **settings: Any) -> None:
        expected = self.keras.fit(*arguments, verbose=0, **settings).history
        history = self.trainer.fit(*arguments, verbose=0, **settings).history
        small.assert_same_history(history, expected)
        if not same_iterations:
            self.keras.optimizer.iterations.assign(self.trainer.model.optimizer.iterations.numpy())
        small.assert_same_state(small.state(self.trainer.model), small.state(self.keras), 1e-5)


@pytest.fixture(scope="module")
def compiled(logical_cpus: list[str]) -> Twins:
    return Twins("mirrored")


@pytest.fixture
def twins(compiled: Twins) -> Twins:
    return compiled.reset()


# --- fit --------------------------------------------------------------------------------------------------------------


FITS: dict[str, dict[str, Any]] = {
    "initial epoch": {"epochs": 4, "initial_epoch": 2},
    "validation": {"epochs": 5, "validation_data": small.data, "validation_steps": 3, "validation_freq": 2},
    "validation epochs": {"epochs": 4, "validation_data": small.data, "validation_freq": [1, 4]},
    "validation weights": {
        "epochs": 2,
        "validation_batch_size": 8,
        "validation_data": lambda: (inputs(), labels(), np.linspace(0, 2, NUM_EXAMPLES).astype("float32")),
    },
    "class weight": {"epochs": 2, "class_weight": {0: 0.5, 2: 3.0}},
    "steps per epoch": {"epochs": 3, "steps_per_epoch": 4},
    "steps per epoch beyond the data": {"epochs": 1, "steps_per_epoch": 14},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_fit_equals_keras_fit(twins: Twins, name: str) -> None:
    settings = {key: value() if key == "validation_data" else value for key, value in FITS[name].items()}
    twins.assert_same_fit(small.data(), **settings)


def test_epochs_continue_within_an_endless_pass(twins: Twins) -> None:
    twins.assert_same_fit(small.data().repeat(), epochs=4, steps_per_epoch=3)


@pytest.mark.parametrize("kind", ["filter", "generator"])
def test_fit_takes_datasets_of_unknown_length(twins: Twins, kind: str) -> None:
    def generate() -> Iterator[Any]:
        for start in range(0, NUM_EXAMPLES, 8):
            yield inputs()[start : start + 8], labels()[start : start + 8]

    signature = (tf.TensorSpec((None, 5), "float32"), tf.TensorSpec((None,), "int64"))
    datasets = {
        "filter": small.data().filter(lambda features, targets: tf.shape(targets)[0] > 0),
        "generator": tf.data.Dataset.from_generator(generate, output_signature=signature),
    }
    # Keras 3.15 counts one step too many in every epoch where it runs into the end of the data.
    twins.assert_same_fit(datasets[kind], epochs=2, validation_data=datasets[kind], same_iterations=False)
    assert int(twins.trainer.model.optimizer.iterations.numpy()) == {"filter": 20, "generator": 10}[kind]


@pytest.mark.extended
def test_fit_takes_weighted_arrays_and_holds_the_last_rows_out(twins: Twins) -> None:
    weights = np.linspace(0, 2, NUM_EXAMPLES).astype("float32")
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "validation_split": 0.3}
    twins.assert_same_fit(inputs(), labels(), sample_weight=weights, **settings)


@pytest.mark.few(1)
def test_shuffled_arrays_have_an_order_of_their_own_every_epoch_fixed_by_the_seed(twins: Twins) -> None:
    seen: list[list[float]] = []
    for seed in (0, 0, 1):
        trainer = twins.reset().trainer
        keras.utils.set_random_seed(0)
        trainer.seed = seed
        seen.append(trainer.fit(inputs(), labels(), batch_size=8, epochs=3, verbose=0).history["loss"])
    twins.trainer.seed = 0
    assert seen[0] == seen[1], "the same seed, the same order"
    assert seen[0] != seen[2], "another seed, another order"
    in_order = twins.reset().trainer.fit(inputs(), labels(), batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert in_order.history["loss"] != seen[0], "shuffled by default, as in Keras"


def test_a_shuffled_dataset_is_trained_in_the_order_in_which_it_iterates(twins: Twins) -> None:
    """Epoch e sees what the e-th `for batch in dataset` would."""
    tf.random.set_seed(0)
    dataset = small.shuffled()
    for epoch in range(3):
        batches = list(dataset)
        in_order = tf.data.Dataset.from_tensors(batches[0])
        for batch in batches[1:]:
            in_order = in_order.concatenate(tf.data.Dataset.from_tensors(batch))
        twins.keras.fit(in_order, initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    tf.random.set_seed(0)
    twins.trainer.fit(small.shuffled(), epochs=3, verbose=0)
    small.assert_same_state(small.state(twins.trainer.model), small.state(twins.keras), 1e-5)


# --- evaluate and predict ---------------------------------------------------------------------------------------------


def test_evaluate_equals_keras(twins: Twins) -> None:
    for settings in ({}, {"steps": 3}, {"return_dict": True}):
        expected = twins.keras.evaluate(small.data(), verbose=0, **settings)
        actual = twins.trainer.evaluate(small.data(), verbose=0, **settings)
        assert type(actual) is type(expected)
        if isinstance(expected, dict):
            assert actual.keys() == expected.keys()
            actual, expected = list(actual.values()), [expected[name] for name in actual]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_evaluate_takes_weighted_arrays(twins: Twins) -> None:
    weights = np.linspace(0, 2, NUM_EXAMPLES).astype("float32")
    expected = twins.keras.evaluate(inputs(), labels(), batch_size=8, sample_weight=weights, verbose=0)
    actual = twins.trainer.evaluate(inputs(), labels(), batch_size=8, sample_weight=weights, verbose=0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("steps", [None, 2])
def test_predict_equals_keras_in_the_order_of_the_inputs(twins: Twins, steps: int | None) -> None:
    with_targets = parity_cases.batches(NUM_EXAMPLES, 6)
    for source in (with_targets, with_targets.map(lambda features, targets: features), inputs()):
        settings = {"batch_size": 6} if isinstance(source, np.ndarray) else {}
        expected = twins.keras.predict(source, verbose=0, steps=steps, **settings)
        actual = twins.trainer.predict(source, verbose=0, steps=steps, **settings)
        assert isinstance(actual, np.ndarray)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
@by_strategy
@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "list"])
def test_several_outputs_come_as_keras_gives_them(strategy: str, as_dict: bool) -> None:
    trainer = tfpar.Trainer(parity_cases.two_outputs(as_dict), small.STRATEGIES[strategy](), seed=0)
    keras.utils.set_random_seed(0)
    model = parity_cases.two_outputs(as_dict)()
    dataset = parity_cases.two_outputs_data(as_dict)()
    expected, actual = model.predict(dataset, verbose=0), trainer.predict(dataset, verbose=0)
    assert type(actual) is type(expected)
    keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), actual, expected)
    np.testing.assert_allclose(
        trainer.evaluate(dataset, verbose=0),
        model.evaluate(dataset, verbose=0),
        rtol=1e-5,
        err_msg="evaluate returns a list in Keras' order",
    )


def two_inputs(names: tuple[str, str] = ("b", "a"), as_dict: bool = False) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        sizes = {"a": 5, "b": 3}
        given = [keras.Input((sizes[name],), name=name) for name in names]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(given))
        model = keras.Model(dict(zip(names, given, strict=True)) if as_dict else given, output)
        model.compile("sgd", "mse")
        return model

    return build


def features(*names: str) -> dict[str, np.ndarray]:
    sizes = {"a": 5, "b": 3, "unused": 2}
    return {name: np.random.default_rng(0).normal(size=(9, sizes[name])).astype("float32") for name in names}


@pytest.mark.few(1)
@by_strategy
@pytest.mark.parametrize(
    ("as_dict", "names"), [(False, ("a", "b")), (True, ("a", "b")), (True, ("a", "b", "unused"))],
    ids=["list of named inputs", "dict", "dict with more than is used"],
)  # fmt: skip
def test_several_inputs_are_matched_by_name(strategy: str, as_dict: bool, names: tuple[str, ...]) -> None:
    trainer = tfpar.Trainer(two_inputs(as_dict=as_dict), small.STRATEGIES[strategy](), seed=0)
    keras.utils.set_random_seed(0)
    model = two_inputs(as_dict=as_dict)()
    targets = np.ones((9, 1), "float32")
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    expected = model.fit(features(*names), targets, **arguments).history
    small.assert_same_history(trainer.fit(features(*names), targets, **arguments).history, expected)
    expected = model.predict(features(*names), verbose=0)
    np.testing.assert_allclose(trainer.predict(features(*names), verbose=0), expected, rtol=1e-5)


# --- save -------------------------------------------------------------------------------------------------------------


def test_a_saved_model_loads_with_plain_keras_where_tfpar_is_not_installed(
    logical_cpus: list[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "inputs.npy", inputs())
    for name, strategy in small.STRATEGIES.items():
        trainer = tfpar.Trainer(small.build_model, strategy())
        trainer.fit(small.data(), verbose=0)
        trainer.save(tmp_path / f"{name}.keras")
        np.save(tmp_path / f"{name}.npy", trainer.predict(inputs(), verbose=0))
    script = """
        import sys
        sys.modules["tfpar"] = None  # importing it is an error
        import keras, numpy as np
        for name in sys.argv[1:]:
            model = keras.models.load_model(f"{name}.keras")
            predicted = model.predict(np.load("inputs.npy"), verbose=0)
            np.testing.assert_allclose(predicted, np.load(f"{name}.npy"), rtol=1e-5)
            assert model.optimizer.iterations.numpy() == 10, "the optimizer is saved too"
            print(name, "is equal")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *small.STRATEGIES]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    for name in small.STRATEGIES:
        assert f"{name} is equal" in completed.stdout, completed.stderr[-2000:]


def test_save_refuses_another_suffix(twins: Twins, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end with \.keras, received '.*model\.h5'\. Name it model\.keras\."):
        twins.trainer.save(tmp_path / "model.h5")
    assert not list(tmp_path.iterdir())


def test_save_leaves_an_earlier_file_whole_when_it_fails(twins: Twins, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    twins.trainer.save(path)
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:

        def fail(*arguments: Any, **settings: Any) -> None:
            Path(arguments[0]).write_bytes(b"half")
            raise OSError("No space left on device")

        patch.setattr(twins.trainer.model, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            twins.trainer.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.keras"], "nothing half-written is left"


# --- kinds of models --------------------------------------------------------------------------------------------------


class WithoutTraining(keras.Model):
    """A subclass whose `call` takes no `training`, built by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, "tanh")
        self.kinds = keras.layers.Dense(3)

    def call(self, features: Any) -> Any:
        return self.kinds(self.hidden(features))


def subclassed() -> keras.Model:
    model = WithoutTraining()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def unbuilt_sequential() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def frozen() -> keras.Model:
    model = small.build_model()
    model.trainable = False
    model.compile("adam", model.loss)
    return model


class HasUnused(WithoutTraining):
    """A subclass with an unused weight and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = self.add_weight(shape=(2,), name="unused")
        self.largest = keras.metrics.Mean(name="mean_output")

    def call(self, features: Any) -> Any:
        outputs = super().call(features)
        self.largest.update_state(outputs)
        return outputs


def has_unused() -> keras.Model:
    model = HasUnused()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


MODELS = {
    "call without training": subclassed,
    "unbuilt Sequential": unbuilt_sequential,
    "nothing trainable": frozen,
    "a weight without gradient": has_unused,
}


@pytest.mark.few(1)
@by_strategy
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights", "ignore:Gradients do not exist")
def test_any_kind_of_keras_model_trains_as_with_keras(strategy: str, name: str) -> None:
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    expected = model.fit(small.data(), verbose=0).history
    trainer = tfpar.Trainer(MODELS[name], small.STRATEGIES[strategy](), seed=0)
    history = trainer.fit(small.data(), verbose=0).history
    small.assert_same_history(history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)


def test_an_unbuilt_model_predicts(logical_cpus: list[str]) -> None:
    for strategy in small.STRATEGIES.values():
        assert tfpar.Trainer(subclassed, strategy()).predict(inputs(), verbose=0).shape == (NUM_EXAMPLES, 3)


# --- precision and compilation ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@by_strategy
def test_python_at_every_step_does_not_change_the_result(strategy: str) -> None:
    build = parity_cases.classifier(run_eagerly=True)
    small.assert_trains_as_one_device(build, small.data, small.STRATEGIES[strategy], epochs=1)


def test_run_eagerly_runs_python_at_every_step(logical_cpus: list[str]) -> None:
    calls = []

    class Prints(keras.layers.Layer):
        def call(self, features: Any) -> Any:
            calls.append(tf.executing_eagerly())
            return features

    trainer = tfpar.Trainer(parity_cases.classifier(layers=lambda: [Prints()], run_eagerly=True))
    calls.clear()
    trainer.fit(small.data(), verbose=0)
    assert calls.count(True) == small.STEPS_PER_EPOCH
    calls.clear()
    trainer.predict(inputs(), batch_size=10, verbose=0)
    assert calls.count(True) == 4, f"predict too runs eagerly: {calls}"


# --- not a number -----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@by_strategy
def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_last_good_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    poisoned, targets = parity_cases.inputs(64), parity_cases.labels(64)
    poisoned[41, 0] = np.nan  # the sixth batch of eight
    dataset = tf.data.Dataset.from_tensor_slices((poisoned, targets)).batch(8)
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy]())
    trainer.fit(small.data(), verbose=0)
    message = r"The loss must stay finite, and is not at step 16 \(step 6 of epoch 1\)\."
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(dataset, epochs=2, verbose=0, steps_per_call=2, checkpoints=tfpar.Checkpoints(tmp_path, 0))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000012.npz", "step-00000014.npz"]
    resumed = tfpar.Trainer(small.build_model, small.STRATEGIES[strategy]())
    tfpar.Checkpoints(tmp_path).restore(_built(resumed))
    assert all(np.isfinite(weight).all() for weight in resumed.model.get_weights())


def _built(trainer: tfpar.Trainer) -> keras.Model:
    trainer.evaluate(small.data(), verbose=0)
    return trainer.model


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [*small.STRATEGIES.values(), lambda: tfpar.Pipeline(2, 2)])
def test_a_model_that_is_not_compiled_predicts_and_is_refused_by_fit_and_evaluate(strategy: Any) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3)], name="mine")
    trainer = tfpar.Trainer(lambda: model, strategy(), seed=None)
    expected = keras.ops.convert_to_numpy(model(inputs()))
    np.testing.assert_allclose(trainer.predict(inputs(), batch_size=8, verbose=0), expected, rtol=1e-6)
    for method in ("fit", "evaluate"):
        with pytest.raises(
            ValueError, match=rf"`compile\(\)` before calling `{method}\(\)`, and 'mine' is not compiled"
        ):
            getattr(trainer, method)(small.data(), verbose=0)
    trainer.compile("sgd", small.build_model().loss)
    assert np.isfinite(trainer.fit(small.data(), verbose=0).history["loss"]).all()


KINDS = ("train", "test", "predict")
OWN_STEPS = {f"{kind}_step": f"Own overrides {kind}_step, which takes it whole" for kind in KINDS}
FUNCTIONS = {
    f"make_{kind}_function": f"Own overrides make_{kind}_function, and a strategy makes .* Override {kind}_step"
    for kind in KINDS
}


@pytest.mark.parametrize("of_object", [False, True], ids=["class", "object"])
@pytest.mark.parametrize("step", [*OWN_STEPS, *FUNCTIONS])
def test_a_model_that_overrides_a_step_is_refused(step: str, of_object: bool) -> None:
    kind = type("Own", (keras.Sequential,), {} if of_object else {step: lambda self, data: None})

    def build() -> keras.Model:
        model = kind([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        if of_object:
            setattr(model, step, lambda data: None)
        return model

    strategy = tfpar.Pipeline(2, 4) if step in OWN_STEPS else tfpar.SingleDevice()
    with pytest.raises(ValueError, match={**OWN_STEPS, **FUNCTIONS}[step]):
        tfpar.Trainer(build, strategy)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_only_the_method_that_a_model_overrides_is_refused(method: str) -> None:
    kind = type("Own", (keras.Sequential,), {method: lambda self, *arguments: None})

    def build() -> keras.Model:
        model = kind([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", small.build_model().loss)
        return model

    trainer = tfpar.Trainer(build)
    for verb in ("fit", "evaluate", "predict"):
        refused = pytest.raises(ValueError, match=f"Own overrides {method}, and trainer.{method} does not call it")
        with refused if verb == method else contextlib.nullcontext():
            getattr(trainer, verb)(small.data(), verbose=0)


def test_a_model_of_keras_hub_with_a_preprocessor_is_refused() -> None:
    """Its own `fit` applies the preprocessor; a trainer would train on other data."""
    keras_hub = pytest.importorskip("keras_hub")

    def build() -> keras.Model:
        backbone = keras_hub.models.ViTBackbone((16, 16, 3), (4, 4), num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
        preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(None)
        return keras_hub.models.ViTImageClassifier(backbone, num_classes=2, preprocessor=preprocessor)

    trainer = tfpar.Trainer(build)
    trainer.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=r"fit applies the model's preprocessor, and trainer\.fit does not"):
        trainer.fit(np.zeros((2, 16, 16, 3)), np.zeros(2), verbose=0)


def of_four_features() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.zeros((8, 4), "float32"), np.zeros(8, "int64"))).batch(4)


# The method, its data and settings, and what the error says.
WRONG: list[tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any], str]] = [
    *(
        (verb, lambda: (of_four_features(),), {}, r"takes \(None, 5\) and the dataset yields \(None, 4\)")
        for verb in VERBS
    ),
    *((verb, lambda: (small.data().take(0),), {}, "at least one batch, but this one is empty") for verb in VERBS),
    (
        "fit",
        lambda: (small.data(),),
        {"validation_data": lambda: small.data().take(0)},
        "must yield at least one batch",
    ),
    ("fit", lambda: (small.data(), labels()), {}, "Targets and weights are part of a dataset"),
    ("fit", lambda: (iter([inputs(), labels()]),), {}, r"must be an array .*or pass a tf\.data\.Dataset"),
    ("fit", lambda: (small.data(),), {"steps_per_call": 0}, "steps_per_call must be at least 1, received 0"),
]


@pytest.mark.parametrize(("verb", "data", "settings", "message"), WRONG)
def test_data_that_cannot_be_used_are_refused_before_the_first_step(
    twins: Twins, verb: str, data: Callable[[], tuple[Any, ...]], settings: dict[str, Any], message: str
) -> None:
    made = {name: value() if callable(value) else value for name, value in settings.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(twins.trainer, verb)(*data(), verbose=0, **made)
    assert int(twins.trainer.model.optimizer.iterations.numpy()) == 0


def test_a_model_built_outside_the_scope_is_moved_into_it_unless_it_holds_bare_variables() -> None:
    model = small.build_model()
    tfpar.Trainer(lambda: model, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=None)
    model = small.build_model()
    model.layers[0].count = tf.Variable(0.0, name="count")
    with pytest.raises(ValueError, match=r"Keras variables only, and layer 'dense\w*' holds the tf\.Variable 'count"):
        tfpar.Trainer(lambda: model, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=None)


# --- randomness -------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@by_strategy
def test_the_same_seed_gives_the_same_run_twice(strategy: str) -> None:
    """Dropout's masks too."""
    build = parity_cases.classifier(layers=lambda: [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)])
    states = []
    for seed in (0, 0, 1):
        trainer = tfpar.Trainer(build, small.STRATEGIES[strategy](), seed=seed)
        trainer.fit(small.shuffled(), epochs=2, verbose=0)
        states.append(small.state(trainer.model))
    small.assert_same_state(states[1], states[0])
    assert not np.array_equal(states[2][0], states[0][0]), "another seed gives other weights"


def test_dropout_on_one_device_equals_keras(logical_cpus: list[str]) -> None:
    build = parity_cases.classifier(layers=lambda: [keras.layers.Dropout(0.5)])
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(small.data(), epochs=2, verbose=0).history
    trainer = tfpar.Trainer(build, seed=0)
    small.assert_same_history(trainer.fit(small.data(), epochs=2, verbose=0).history, expected, 1e-6)
    small.assert_same_state(small.state(trainer.model), small.state(model), 1e-6)

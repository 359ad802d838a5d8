"""Callbacks are called as Keras' own `fit`, `evaluate` and `predict` call them: order, numbers, logs and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    **small.STRATEGIES,
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=["CPU:0", "CPU:1"], balance=[1, 1]),
}
HOOKS = [
    *(f"on_{kind}_{moment}" for kind in ("train", "test", "predict") for moment in ("begin", "end")),
    *(f"on_{kind}_batch_{moment}" for kind in ("train", "test", "predict") for moment in ("begin", "end")),
    *("on_epoch_begin", "on_epoch_end"),
]


class Recorder(keras.callbacks.Callback):
    """Records each call of a hook, and sets an attribute of the model where one is asked for."""

    def __init__(self, at: tuple[str, int] | None = None, sets: str = "") -> None:
        super().__init__()
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []
        self.at, self.sets = at, sets

    def record(self, hook: str, number: int | None, logs: Any) -> None:
        self.events.append((hook, number, dict(logs or {})))
        assert len(self.events) < 300, "endless data are not left"
        if (hook, number) == self.at:
            setattr(self.model, self.sets, True)


def _hook(name: str) -> Any:
    def numbered(self: Recorder, number: int, logs: Any = None) -> None:
        self.record(name, number, logs)

    def plain(self: Recorder, logs: Any = None) -> None:
        self.record(name, None, logs)

    return numbered if "batch" in name or "epoch" in name else plain


for _name in HOOKS:
    setattr(Recorder, _name, _hook(_name))


def build(steps_per_execution: int) -> Callable[[], keras.Model]:
    """Two layers, a metric of one value and a metric of a vector of one value."""

    def build_model() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((parity_cases.NUM_FEATURES,)),
                keras.layers.Dense(4, "tanh"),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=[keras.metrics.F1Score(threshold=0.5), "mae"],
            steps_per_execution=steps_per_execution,
        )
        return model

    return build_model


def data() -> tf.data.Dataset:
    """Ten batches, the last of 1 example."""
    labels = (parity_cases.labels(73) > 0).astype("float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((parity_cases.inputs(73), labels)).batch(8)


def of_endless_data(trainer: Any, decides: bool) -> list[Any]:
    """What evaluating and predicting endless data gives; a callback that decides ends them, and what all saw."""
    answers: list[Any] = []
    for verb, kind, sets in (("evaluate", "test", "stop_evaluating"), ("predict", "predict", "stop_predicting")):
        recorder = Recorder((f"on_{kind}_batch_end", 5) if decides else None, sets)
        answers.append(getattr(trainer, verb)(data().repeat(), verbose=0, callbacks=recorder))
        answers.append([float(number or 0) for _, number, _ in recorder.events])
    return answers


class Both:
    """A trainer and its model's twin under Keras alone, both set back before every run."""

    def __init__(self, strategy: str, steps_per_execution: int) -> None:
        build_model = build(steps_per_execution)
        self.trainer = tfpar.Trainer(build_model, STRATEGIES[strategy](), seed=0)
        keras.utils.set_random_seed(0)
        self.keras = build_model()
        self._again = [small.Again(self.trainer.model), small.Again(self.keras)]

    def run(self, verb: str, *arguments: Any, recorder: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
        """Run a verb under Keras and under tfpar; compare what callbacks saw, results and weights; return events."""
        recorders, results = [], []
        for one, again in zip((self.keras, self.trainer), reversed(self._again), strict=True):
            again.reset()
            recorders.append(Recorder(**(recorder or {})))
            callbacks = settings.get("callbacks", lambda recorder, model: [recorder])
            made = callbacks(recorders[-1], self.keras if one is self.keras else self.trainer.model)
            results.append(getattr(one, verb)(*arguments, **{"verbose": 0, **settings, "callbacks": made}))
        assert_same_events(recorders[1].events, recorders[0].events)
        if verb == "fit":
            small.assert_same_history(results[1].history, results[0].history)
            assert results[1].epoch == results[0].epoch
            assert results[1].params == results[0].params
        elif verb == "evaluate" and settings.get("return_dict"):
            assert_same_logs(results[1], results[0], "the result")
        else:
            for values in zip(*results, strict=True):
                np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)
        small.assert_same_state(small.state(self.trainer.model), small.state(self.keras), 1e-5)
        return recorders[1].events


def assert_same_events(actual: list[Any], expected: list[Any]) -> None:
    assert [event[:2] for event in actual] == [event[:2] for event in expected]
    for (hook, number, logs), (_, _, wanted) in zip(actual, expected, strict=True):
        assert_same_logs(logs, wanted, f"{hook} {number}")


def assert_same_logs(logs: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    assert list(logs) == list(wanted), f"the logs of {where} hold {list(logs)} instead of {list(wanted)}"
    for name, value in wanted.items():
        assert type(logs[name]) is type(value), f"{name} of {where} is {logs[name]!r} instead of {value!r}"
        assert np.shape(logs[name]) == np.shape(value), f"{name} of {where} is {logs[name]!r} instead of {value!r}"
        np.testing.assert_allclose(logs[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} of {where}")


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, logical_cpus: list[str]) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[1, 3], ids=["step by step", "3 steps per execution"])
def both(strategy: str, request: pytest.FixtureRequest) -> Both:
    return Both(strategy, request.param)


@pytest.fixture(scope="module")
def step_by_step(strategy: str) -> Both:
    return Both(strategy, 1)


@pytest.fixture
def limits() -> Iterator[None]:
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


FITS: dict[str, dict[str, Any]] = {
    "validation": {"epochs": 2, "validation_data": True},
    "validation, some steps": {"epochs": 2, "validation_data": True, "validation_steps": 4, "validation_freq": [2]},
    "steps of a pass": {"epochs": 3, "steps_per_epoch": 5},
    "steps that are no multiple": {"epochs": 2, "steps_per_epoch": 4},
    "no epochs": {"epochs": 0},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FITS)
def test_fit_calls_every_hook_as_keras_does(both: Both, name: str) -> None:
    settings = FITS[name] | ({"validation_data": data()} if "validation_data" in FITS[name] else {})
    both.run("fit", data(), **settings)


@pytest.mark.extended
def test_fit_on_endless_data_calls_every_hook_as_keras_does(both: Both) -> None:
    both.run("fit", data().repeat(), epochs=2, steps_per_epoch=4)


@pytest.mark.parametrize("settings", [{}, {"steps": 4}, {"return_dict": True}], ids=str)
def test_evaluate_calls_every_hook_as_keras_does(both: Both, settings: dict[str, Any]) -> None:
    both.run("evaluate", data(), **settings)


@pytest.mark.parametrize("settings", [{}, {"steps": 4}], ids=str)
def test_predict_calls_every_hook_as_keras_does(both: Both, settings: dict[str, Any]) -> None:
    both.run("predict", data(), **settings)


# --- what callbacks may set


@pytest.mark.parametrize("hook", ["on_train_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
def test_a_callback_stops_training_where_keras_does(both: Both, hook: str) -> None:
    first_end = both.keras.steps_per_execution - 1
    number = {"on_train_begin": None, "on_train_batch_end": first_end}.get(hook, 0)
    events = both.run("fit", data(), epochs=3, recorder={"at": (hook, number), "sets": "stop_training"})
    assert [event[0] for event in events].count("on_epoch_end") == 1
    assert both.trainer.model.stop_training


def test_a_callback_without_hooks_for_batches_stops_where_keras_does(both: Both) -> None:
    """Keras ends an epoch after the step that follows the request, and tfpar's calls have many steps."""

    def stop_at_the_third_epoch(recorder: Recorder, model: keras.Model) -> list[keras.callbacks.Callback]:
        def on_epoch_begin(epoch: int, logs: Any) -> None:
            model.stop_training = epoch == 2

        return [keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)]

    both.run("fit", data(), epochs=4, callbacks=stop_at_the_third_epoch)
    per_execution = both.keras.steps_per_execution
    assert int(both.keras.optimizer.iterations.numpy()) == 2 * 10 + per_execution


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_callback_ends_an_evaluation_and_a_prediction_of_endless_data(both: Both, verb: str) -> None:
    kind, attribute = {"evaluate": ("test", "stop_evaluating"), "predict": ("predict", "stop_predicting")}[verb]
    at = (f"on_{kind}_batch_end", 2 * both.keras.steps_per_execution - 1)
    for _ in range(2):  # the second run is not stopped by what the first one set
        events = both.run(verb, data().repeat(), recorder={"at": at, "sets": attribute})
        assert [event[0] for event in events].count(f"on_{kind}_batch_end") == 2


@pytest.mark.few(1)
def test_a_callback_ends_the_validation_and_training_continues(step_by_step: Both) -> None:
    recorder = {"at": ("on_test_batch_end", 2), "sets": "stop_evaluating"}
    step_by_step.run("fit", data(), epochs=2, validation_data=data(), recorder=recorder)


# --- how callbacks may be given


CALLBACKS: dict[str, Callable[[Recorder, keras.Model], Any]] = {
    "one": lambda recorder, model: recorder,
    "a tuple": lambda recorder, model: (recorder,),
    "nested": lambda recorder, model: [[recorder], keras.callbacks.EarlyStopping("loss")],
    "a CallbackList": lambda recorder, model: keras.callbacks.CallbackList(
        [recorder], add_history=True, model=model, epochs=2
    ),
}


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_may_be_one_a_list_or_a_callback_list(step_by_step: Both, name: str, verb: str) -> None:
    events = step_by_step.run(verb, data(), callbacks=CALLBACKS[name])
    assert events


def test_a_callback_list_needs_neither_history_nor_model(step_by_step: Both) -> None:
    recorder = Recorder()
    given = keras.callbacks.CallbackList([recorder])
    history = step_by_step.trainer.fit(data(), epochs=2, verbose=0, callbacks=given)
    assert len(history.history["loss"]) == 2
    assert recorder.model is step_by_step.trainer.model
    assert given.callbacks == [recorder], "the user's list stays as it is"


@pytest.mark.parametrize(
    ("given", "received"),
    [(keras.callbacks.EarlyStopping, "the class EarlyStopping. Write EarlyStopping"), ("early", "'early'")],
    ids=["a class", "a word"],
)
def test_something_that_is_no_callback_is_refused(step_by_step: Both, given: Any, received: str) -> None:
    with pytest.raises(TypeError, match=rf"callbacks must be keras\.callbacks\.Callback objects, received {received}"):
        step_by_step.trainer.fit(data(), verbose=0, callbacks=[given])


@pytest.mark.parametrize("frequency", [0, 1.5])
def test_a_validation_frequency_that_is_none_is_refused(step_by_step: Both, frequency: Any) -> None:
    with pytest.raises(ValueError, match=rf"validation_freq must be a number of epochs .*, received {frequency}\."):
        step_by_step.trainer.fit(data(), verbose=0, validation_data=data(), validation_freq=frequency)


# --- limits for debugging


@pytest.mark.usefixtures("limits")
@pytest.mark.filterwarnings("ignore:Limiting")
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_kerass_limits_of_epochs_and_steps_count(both: Both, verb: str) -> None:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    settings = {"epochs": 4, "validation_data": data(), "validation_steps": 5} if verb == "fit" else {}
    both.run(verb, data(), **settings)
    both.run(verb, data(), **settings, **({"steps_per_epoch": 2} if verb == "fit" else {"steps": 2}))


@pytest.mark.usefixtures("limits")
def test_a_limit_is_announced_as_by_keras(step_by_step: Both) -> None:
    keras.config.set_max_epochs(1)
    keras.config.set_max_steps_per_epoch(2)
    with pytest.warns(UserWarning, match="Limiting") as warnings:
        step_by_step.trainer.fit(data(), epochs=2, verbose=0)
    assert [str(one.message) for one in warnings] == ["Limiting epochs to 1", "Limiting steps_per_epoch to 2"]


# --- a progress bar


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_the_progress_bar_counts_as_keras_does(both: Both, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    def last_count(text: str) -> str:
        lines = [line for line in text.replace("\r", "\n").replace("\x08", "").splitlines() if "/" in line]
        return lines[-1].split()[0].removeprefix("\x1b[1m")

    shown = []
    for one in (both.keras, both.trainer):
        getattr(one, verb)(data(), verbose=1)
        shown.append(last_count(capsys.readouterr().out))
    assert shown[1] == shown[0]

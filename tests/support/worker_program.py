"""The program of a worker for test_multi_worker_multi_process.py: one function after another, in float64.

The same functions run on two workers, each with two logical CPUs. They use `RANK` where the workers differ.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops import test_hooks as hooks
from tests.support import command, docstrings, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.parity_cases import CASES
from tests.trainer import test_compute_loss as compute_loss
from tests.trainer import test_metric_entries as metric_entries
from tests.trainer import test_model_methods as model_methods
from tfpar.strategies.multi_worker import preflight

FOLDER, RANK = workers.place()
ONE = ["CPU:0"]


def trained(trainer: tfpar.Trainer, dataset: Any, **fit: Any) -> cases.Trained:
    history = trainer.fit(dataset, **{"epochs": 2, "verbose": 0, **fit}).history
    return cases.Trained(history, cases.state(trainer.model))


class Functions:
    """The functions of the program: all methods without a leading underscore, in this order."""

    @functools.cached_property
    def _plain(self) -> tfpar.MultiWorker:
        return tfpar.MultiWorker(ONE)

    @functools.cached_property
    def _two_devices(self) -> tfpar.MultiWorker:
        return tfpar.MultiWorker()

    @functools.cached_property
    def _small(self) -> cases.Reused:
        return cases.Reused(self._plain)

    # --- parity beyond the table

    def drop_in(self) -> Any:
        """Train a model built under TensorFlow's own strategy, which reads TF_CONFIG.

        First, because TensorFlow's strategy disables the collective operations of the strategies created before it.
        """
        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            keras.utils.set_random_seed(RANK)  # the chief's weights are broadcast
            model = small.build_model()
        twice = [tfpar.fit(model, small.data(), epochs=1, verbose=0).history for _ in range(2)]
        return twice, cases.state(model)

    def two_devices_a_worker(self) -> Any:
        results = {}
        for name in cases.ON_TWO_DEVICES:
            case = CASES[name]
            trainer = tfpar.Trainer(case.build, self._two_devices, seed=0)
            results[name] = trained(trainer, case.data(), epochs=case.epochs, **case.fit)
        return results

    def compression(self) -> Any:
        strategy = tfpar.MultiWorker(ONE, compression="bfloat16")
        return trained(tfpar.Trainer(small.build_model, strategy, seed=0), small.data())

    def compiled_by_xla(self) -> Any:
        return trained(tfpar.Trainer(cases.compiled_by_xla, self._plain, seed=0), small.data())

    def fine_tuned_from_keras(self) -> Any:
        keras.utils.set_random_seed(0)
        model = small.build_model()
        model.fit(small.data(), verbose=0)
        trainer = tfpar.Trainer(model, self._plain)
        first = trained(trainer, small.data())
        return first, cases.fine_tuned(model, trainer.fit), tfpar.evaluate(model, small.data(), verbose=0)

    def eagerly(self) -> Any:
        return trained(tfpar.Trainer(cases.eager, self._plain, seed=0), small.data(), epochs=1)

    def mixed_precision(self) -> Any:
        return trained(tfpar.Trainer(cases.mixed_precision, self._plain, seed=0), small.data())

    def steps_of_an_endless_dataset(self) -> Any:
        trainer = self._small.initial()
        return trained(trainer, small.data().repeat(), steps_per_epoch=7, epochs=3)

    def arrays_and_a_split(self) -> Any:
        trainer = self._small.initial()
        arrays = cases.arrays()
        return trained(trainer, arrays[0], y=arrays[1], batch_size=8, shuffle=False, validation_split=0.2)

    def inputs(self) -> Any:
        """Train with inputs that Python shuffles in another order on each worker: the chief's order is broadcast."""
        return {name: cases.with_input(name, self._plain, seed=RANK) for name in cases.INPUTS}

    def examples_in_docstrings(self) -> Any:
        return {f"{one.module}.{one.name}": docstrings.run(one) for one in docstrings.called(*docstrings.IN_A_JOB)}

    # --- parameter averaging

    def averaged_every_step(self) -> Any:
        trainer = tfpar.Trainer(cases.plain_sgd, tfpar.MultiWorker(ONE, sync="average"), seed=0)
        return trained(trainer, cases.equal_parts())

    def averaged_every_step_on_two_devices(self) -> Any:
        trainer = tfpar.Trainer(cases.plain_sgd, tfpar.MultiWorker(sync="average"), seed=0)
        return trained(trainer, cases.equal_parts())

    def averaged_rows(self) -> Any:
        trainer = tfpar.Trainer(cases.rows_of_all, tfpar.MultiWorker(ONE, sync="average"), seed=0)
        return trained(trainer, parity_cases._tokens(8).take(2))

    def averaged_every_4(self) -> Any:
        return self._averaged([None, 1, 4, 1000], average_optimizer=True)

    def averaged_every_4_but_the_optimizer(self) -> Any:
        return self._averaged([None, 4], average_optimizer=False)

    def _averaged(self, steps_per_call: list[int | None], average_optimizer: bool) -> Any:
        strategy = tfpar.MultiWorker(ONE, sync="average", every=4, average_optimizer=average_optimizer)
        reused = cases.Reused(strategy)
        return [trained(reused.initial(), cases.equal_parts(), steps_per_call=steps) for steps in steps_per_call]

    # --- methods of the model's class

    def overridden_methods(self) -> Any:
        """Return the results of a model's own `compute_metrics` and `compute_loss`."""
        entries = tfpar.Trainer(metric_entries.build(metric_entries.Derived), self._plain, seed=0)
        loss = tfpar.Trainer(lambda: compute_loss.build(compute_loss.SumsInTraining), self._plain, seed=0)
        return metric_entries.values_of(entries), trained(loss, small.data(), validation_data=small.data())

    # --- decisions

    def decisions(self) -> Any:
        trainer = tfpar.Trainer(cases.plain_sgd, self._plain, seed=0)
        return trained(trainer, small.data(), epochs=12, validation_data=small.data(), callbacks=cases.deciding())

    def stopped_on_worker_1_in_a_batch(self) -> Any:
        return trained(self._small.initial(), small.data(), callbacks=[cases.Stop(RANK == 1, at_step=4)])

    def stopped_on_worker_1_after_an_epoch(self) -> Any:
        return trained(self._small.initial(), small.data(), epochs=5, callbacks=[cases.Stop(RANK == 1, at_epoch=1)])

    def ended_by_worker_1(self) -> Any:
        trainer = tfpar.Trainer(hooks.build(3), self._plain, seed=0)
        return hooks.of_endless_data(trainer, RANK == 1)

    def failed_on_worker_1(self) -> Any:
        """Return the error of each worker after a hook of a callback has raised on worker 1."""
        trainer = self._small.initial()
        run: dict[str, Callable[..., Any]] = {
            "train": functools.partial(trainer.fit, small.data(), epochs=1, validation_data=small.data()),
            "test": functools.partial(trainer.evaluate, small.data()),
            "predict": functools.partial(trainer.predict, small.data()),
        }
        found = {}
        for verb, hook in cases.FAILING_HOOKS:
            with pytest.raises(Exception, match=r".") as raised:
                run[verb](verbose=0, callbacks=[cases.Fails(hook if RANK == 1 else "")])
            found[hook] = f"{type(raised.value).__name__}: {raised.value}"
        return found

    def no_checkpoint_on_the_chief(self) -> Any:
        """Return the error of each worker where the chief cannot read checkpoints, and where its disk is full."""
        trainer, errors = self._small.initial(), []
        (FOLDER / "no folder").touch()
        for folder, num_bytes in (("no folder/checkpoints", None), ("full", 1000)):
            limited = command.file_size_limit(num_bytes) if num_bytes and RANK == 0 else contextlib.nullcontext()
            with limited, pytest.raises(OSError, match=r".") as raised:
                trainer.fit(small.data(), verbose=0, checkpoints=tfpar.Checkpoints(FOLDER / folder, every_seconds=0))
            errors.append(str(raised.value))
        return errors

    def interrupted_on_worker_1(self) -> Any:
        trainer = self._small.initial()
        callback = cases.Interrupt(trainer if RANK == 1 else None, at_step=13)
        # Worker 1 cannot write: the parent of its folder is a file.
        checkpoints = tfpar.Checkpoints(self._chiefs_only("interrupted"), every_seconds=1000)
        result = trained(trainer, small.shuffled(), epochs=3, callbacks=[callback], checkpoints=checkpoints)
        return result, trainer.interrupted

    def signalled_on_worker_1(self) -> Any:
        """Return the code with which each worker ends after SIGTERM to worker 1, and its steps."""
        trainer = self._small.initial()

        def send(batch: int, logs: Any) -> None:
            if RANK == 1 and batch == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        checkpoints = tfpar.Checkpoints(self._chiefs_only("signalled"), every_seconds=1000)
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=send)
        with pytest.raises(SystemExit) as raised:
            trainer.fit(small.data(), verbose=0, callbacks=[callback], checkpoints=checkpoints)
        return raised.value.code, int(trainer.model.optimizer.iterations.numpy())

    def with_few_and_many_checkpoints(self) -> Any:
        """Train uninterrupted, with a checkpoint after each call, and interrupted and resumed."""
        reused = self._small, cases.Reused(self._plain)
        histories = []
        for name, every_seconds, stops in (("few", 1000.0, ()), ("many", 0.0, ()), ("resumed", 1000.0, (20, 33))):
            folder = self._chiefs_only(name)
            trainers = [one.initial() for one in reused]
            for index, step in enumerate((*stops, 0)):
                trainer = trainers[index % 2]  # a new trainer, or one with gradient sums of another step
                history = trainer.fit(
                    small.parity_cases.batches(400, 7),
                    verbose=0,
                    callbacks=[cases.Interrupt(trainer if step else None, at_step=step)],
                    checkpoints=tfpar.Checkpoints(folder, every_seconds),
                ).history
            histories.append(history)
        return histories

    def not_finite(self) -> Any:
        trainer = self._small.initial()
        try:
            trainer.fit(cases.not_finite(), verbose=0, steps_per_call=1)
        except FloatingPointError as error:
            return str(error)

    def continued_after_not_finite(self) -> Any:
        trainer = tfpar.Trainer(cases.plain_sgd, self._plain, seed=0)
        return trained(trainer, cases.not_finite(), epochs=1, nonfinite_loss="continue", steps_per_call=5)

    # --- files

    def _chiefs_only(self, name: str) -> Path:
        """Return a folder on the chief; on worker 1, a path that cannot be created because its parent is a file."""
        if RANK == 0:
            (FOLDER / name).mkdir(exist_ok=True)
            return FOLDER / name
        no_disk = FOLDER / "no disk"
        no_disk.touch()
        return no_disk / name

    def writing(self) -> Any:
        folder = self._chiefs_only("written")
        trainer = tfpar.Trainer(small.build_model, self._plain, seed=0)
        callbacks = [
            keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "step.weights.h5", save_weights_only=True, save_freq=3),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.TensorBoard(folder / "board", histogram_freq=1, update_freq=2),
            keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
            tfpar.MetricsFile(folder / "metrics.jsonl"),
            tfpar.ReplicaCheck(),
        ]
        result = trained(trainer, small.data(), validation_data=small.data(), callbacks=callbacks)
        return result, sorted(os.listdir())

    def restored(self) -> Any:
        """Resume from the backup that `writing` left at the end of epoch 2 of 4."""
        backup = keras.callbacks.BackupAndRestore(self._chiefs_only("written") / "backup", delete_checkpoint=False)
        trainer = tfpar.Trainer(small.build_model, self._plain, seed=1)
        return trained(trainer, small.data(), epochs=4, callbacks=[backup])

    def saved(self) -> Any:
        trainer = self._small.initial()
        trainer.fit(small.data(), verbose=0)
        trainer.save(self._chiefs_only("saved") / "model.keras")
        return trainer.model.get_weights()

    # --- evaluate and predict

    def evaluated_and_predicted(self) -> Any:
        return {name: cases.evaluate_and_predict(strategy) for name, strategy in self._strategies().items()}

    def methods_of_the_model(self) -> Any:
        return {
            name: model_methods.trained(tfpar.Trainer(small.build_model, strategy, seed=0))
            for name, strategy in self._strategies().items()
        }

    def prediction_on_worker_1_alone(self) -> Any:
        model = self._small.initial().model
        return model.predict(parity_cases.inputs(7), batch_size=3, verbose=0) if RANK == 1 else None

    def train_on_batch(self) -> Any:
        return self._small.initial().model.train_on_batch(parity_cases.inputs(4), parity_cases.labels(4))

    def _strategies(self) -> dict[str, tfpar.Strategy]:
        return {"one device": self._plain, "two devices": self._two_devices}

    # --- shards

    def sharded(self, kind: str) -> Any:
        return {name: cases.with_shards(kind, self._sharded_trainer(kind, name)) for name in cases.SHARDED_ON[kind]}

    def _sharded_trainer(self, kind: str, name: str) -> tfpar.Trainer:
        build = cases.sharded_model(kind)
        if build is small.build_model and name == "one device":
            return self._small_of_shards.initial()
        return tfpar.Trainer(build, self._strategies()[name], seed=0)

    @functools.cached_property
    def _small_of_shards(self) -> cases.Reused:
        """A trainer whose first fit is of sharded data."""
        return cases.Reused(self._plain)

    # --- workers that differ

    def other_weights(self) -> Any:
        trainer = tfpar.Trainer(small.build_model, self._plain, seed=RANK)
        return trained(trainer, small.data(), callbacks=[tfpar.ReplicaCheck(every_steps=3)])

    def other_weights_to_evaluate(self) -> Any:
        trainer = tfpar.Trainer(small.build_model, self._plain, seed=RANK)
        return trainer.evaluate(small.data(), verbose=0), trainer.predict(parity_cases.inputs(7), verbose=0)

    def other_rates_and_statistics(self) -> Any:
        """Return the errors where worker 1 lowers its rate, with sharded state, and moves statistics after training."""

        def lower_rate(epoch: int, logs: Any) -> None:
            trainer.model.optimizer.learning_rate = 0.1 / (1 + RANK)

        def move_statistics(logs: Any) -> None:
            trainer.model.layers[1].moving_mean.assign(np.full(5, float(RANK)))

        messages = []
        strategy = tfpar.MultiWorker(ONE, shard="optimizer")
        for on, build, hooks_ in (
            (strategy, small.build_model, {"on_epoch_end": lower_rate}),
            (self._plain, cases.normalized, {"on_train_end": move_statistics}),
        ):
            trainer = tfpar.Trainer(build, on, seed=0)
            with pytest.raises(RuntimeError, match=r".") as raised:
                trainer.fit(small.data(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(**hooks_)])
            messages.append(str(raised.value))
        return messages

    def data_divided_by_rank(self) -> Any:
        inputs, labels = parity_cases.inputs(32), parity_cases.labels(32)

        def generate() -> Any:
            order = np.random.default_rng(RANK).permutation(32)
            yield from zip(inputs[order], labels[order], strict=True)

        slices = tf.data.Dataset.from_tensor_slices
        signature = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), (inputs, labels))
        datasets = {
            "slices": slices((inputs[RANK::2], labels[RANK::2])),
            "skip": slices((inputs, labels)).skip(RANK).take(16),
            "generator": tf.data.Dataset.from_generator(generate, output_signature=signature),
        }
        return {name: self._error_of_fit(dataset.batch(8)) for name, dataset in datasets.items()}

    def other_orders(self) -> Any:
        """Read the same examples in other orders on each worker; return the errors."""
        messages = {name: self._error_of_fit(dataset) for name, dataset in cases.other_orders(RANK).items()}
        own, trainer = cases.other_tail(RANK), self._small.initial()
        calls: dict[str, Callable[[], Any]] = {
            "fit": lambda: trainer.fit(own, verbose=0, steps_per_call=5),
            "validation": lambda: trainer.fit(small.data(), validation_data=own, verbose=0),
            "evaluate": lambda: trainer.evaluate(own, verbose=0),
            "predict": lambda: trainer.predict(own.map(lambda x, _: x), verbose=0),
        }
        for name, call in calls.items():
            with pytest.raises(ValueError, match=r".") as raised:
                call()
            messages[name] = str(raised.value)
        return messages

    def drawn_batches(self) -> Any:
        """Return the warnings about batches that random operations change in other ways, or alike, on each worker."""
        found = {}
        for name, dataset in cases.drawn_batches(RANK).items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._small.initial().fit(dataset, verbose=0, epochs=2, steps_per_call=2)
            found[name] = [str(one.message) for one in caught if "global batches" in str(one.message)]
        return found

    def _error_of_fit(self, dataset: tf.data.Dataset, **settings: Any) -> str:
        with pytest.raises(ValueError, match=r".") as raised:
            self._small.initial().fit(dataset, verbose=0, **settings)
        return str(raised.value)

    def evaluation_by_the_chief_alone(self) -> Any:
        callbacks = []
        if RANK == 0:
            evaluate = functools.partial(self._small.initial().evaluate, small.data(), verbose=0)
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: evaluate()))
        return self._error_of_fit(small.data(), callbacks=callbacks)

    def methods_in_a_scope(self) -> Any:
        """Build a model in the scope; the chief alone predicts before the first `fit`, and in it."""
        with self._plain.scope():
            model = small.initial_model()
            outputs = [model.predict(parity_cases.inputs(7), verbose=0)] if RANK == 0 else []
            history = model.fit(small.data(), verbose=0).history
            outputs.append(model.predict(parity_cases.inputs(7), verbose=0))
        return history, outputs

    def results_in_callbacks(self) -> Any:
        """Return logs and results of the metrics after each epoch and after an evaluation."""
        trainer, found = self._small.initial(), []

        def results() -> dict[str, float]:
            return {name: float(value) for name, value in trainer.model.get_metrics_result().items()}

        callback = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: found.append((dict(logs), results()))
        )
        trainer.fit(small.data(), epochs=2, verbose=0, callbacks=[callback])
        found.append((trainer.evaluate(small.data(), verbose=0, return_dict=True), results()))
        return found

    def files_of_every_worker(self) -> Any:
        """Save the same files on both workers, several times, and read them each time."""
        model = self._small.initial().model
        (FOLDER / "same").mkdir(exist_ok=True)
        for _ in range(5):
            model.save(FOLDER / "same" / "model.keras")
            model.save_weights(str(FOLDER / "same" / "model.weights.h5"))
            loaded = keras.models.load_model(FOLDER / "same" / "model.keras")
            loaded.load_weights(FOLDER / "same" / "model.weights.h5")
            for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
                np.testing.assert_array_equal(one, other)
        return sorted(path.name for path in (FOLDER / "same").iterdir() if "unfinished" not in path.name)

    def other_versions(self) -> Any:
        original = preflight.versions
        if RANK == 1:
            preflight.versions = lambda: {**original(), "Keras' version": "2.0"}
        try:
            tfpar.MultiWorker(ONE)
        except ValueError as error:
            return str(error)
        finally:
            preflight.versions = original

    def other_numbers_of_devices(self) -> Any:
        try:
            tfpar.MultiWorker(None if RANK == 0 else ONE)
        except ValueError as error:
            return str(error)

    def other_models(self) -> Any:
        trainer = tfpar.Trainer(cases.of_width(8 + RANK), self._plain, seed=0)
        try:
            trainer.fit(small.data(), verbose=0)
        except ValueError as error:
            return str(error)

    def data_that_end_early_on_worker_1(self) -> Any:
        """Generators of which TensorFlow does not know the length; then all workers train together again."""
        trainer = self._small.initial()

        def batches(number: int) -> Any:
            return (batch for batch in list(small.data().take(number).as_numpy_iterator()))

        messages = []
        for verb in (trainer.fit, trainer.evaluate, trainer.predict):
            inputs = batches(5 - 2 * RANK)
            try:
                verb(((x,) for x, _ in inputs) if verb == trainer.predict else inputs, verbose=0)
            except ValueError as error:
                messages.append(str(error))
        trainer = self._small.initial()
        return messages, trained(
            trainer,
            tf.data.Dataset.from_generator(
                lambda: list(small.data().as_numpy_iterator()), output_signature=small.data().element_spec
            ),
        )

    def other_calls(self) -> Any:
        """The chief evaluates, predicts or builds alone, and the other worker trains; then all train together."""
        trainer = self._small.initial()
        messages = []
        for verb in (trainer.evaluate, trainer.predict, trainer.build):
            try:
                (verb if RANK == 0 else trainer.fit)(small.data())
            except ValueError as error:
                messages.append(str(error))
        return messages, trained(self._small.initial(), small.data())

    def fit_of_the_model(self) -> Any:
        """`trainer.model.fit` is that of the trainer."""
        trainer = self._small.initial()
        history = trainer.model.fit(small.data(), epochs=2, verbose=0).history
        return cases.Trained(history, cases.state(trainer.model))

    def model_function_that_calls_keras(self) -> Any:
        """Keras' own methods do not run in the scope of several workers."""
        messages = []
        for name in ("fit", "evaluate", "predict"):

            def build(name: str = name) -> Any:
                model = small.build_model()
                getattr(model, name)(small.data(), verbose=0)
                return model

            try:
                tfpar.Trainer(build, self._plain, seed=0)
            except ValueError as error:
                messages.append(str(error))
        return messages

    def data_in_parts(self) -> Any:
        """Each worker reads its part of the data, as a script of `tf.distribute` without automatic sharding."""
        trainer = self._small.initial()
        own = small.data().unbatch().shard(2, RANK).batch(4)
        messages = []
        for verb in (trainer.fit, trainer.evaluate, trainer.predict):
            try:
                verb(own.map(lambda x, _: x) if verb == trainer.predict else own, verbose=0)
            except ValueError as error:
                messages.append(str(error))
        return messages

    def other_order_of_files(self) -> Any:
        """Each worker lists the files in its own order, as `glob` does."""
        names = [f"/data/{number}" for number in range(4)][:: 1 - 2 * RANK]
        shards = tfpar.data.by_file(names, lambda _: small.data().unbatch().take(8), global_batch_size=8, num_shards=4)
        messages = []
        for verb in (self._small.initial().fit, self._small.initial().predict):
            try:
                verb(shards, verbose=0)
            except ValueError as error:
                messages.append(str(error))
        return messages

    def other_data_to_predict(self) -> Any:
        """Each worker predicts for other arrays, and for other batches of a generator; then all for the same."""
        trainer, inputs = self._small.initial(), np.zeros([16, *small.build_model().input_shape[1:]], "float32")
        own = inputs[: 16 - 8 * RANK]
        messages = []
        for given in (own, ((inputs[:8] + RANK,) for _ in range(2))):
            try:
                trainer.predict(given, batch_size=8 if given is own else None, verbose=0)
            except ValueError as error:
                messages.append(str(error))
        return messages, trainer.predict(inputs, batch_size=8, verbose=0)

    def after_other_models(self) -> Any:
        """All workers can train together after the error of `other_models`."""
        return trained(tfpar.Trainer(small.build_model, self._plain, seed=0), small.data())

    def model_function_that_fails_on_worker_1(self) -> Any:
        """The model function fails before its first variable, and between two."""
        messages = []
        for num_layers in (0, 1):
            try:
                tfpar.Trainer(cases.failing_after(num_layers, RANK == 1), self._plain, seed=0)
            except (KeyError, ValueError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        return messages, trained(self._small.initial(), small.data())

    def many_strategies(self) -> Any:
        """Create strategies in quick succession, each of which connects to that of the other worker."""
        return [tfpar.MultiWorker(devices).describe() for devices in [None, ONE] * 10]


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tfpar.use_logical_cpus(2)
    functions = Functions()
    by_name: dict[str, Callable[[], Any]] = {}
    for name, member in vars(Functions).items():
        if name == "sharded":  # a function for each kind, because all kinds in one would exceed the time limit
            by_name |= {f"{name} {kind}": functools.partial(functions.sharded, kind) for kind in cases.SHARDED}
        elif callable(member) and not name.startswith("_"):
            by_name[name] = getattr(functions, name)
    workers.run_all(by_name)


if __name__ == "__main__":
    main()

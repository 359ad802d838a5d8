"""Two workers equal one device: averages, decisions, files, predictions, shards; and they detect differences."""

from __future__ import annotations

import csv
import os
import random
import re
from collections.abc import Iterator

import keras
import numpy as np
import pytest

import tfpar
from tests.loops import test_hooks as hooks
from tests.properties.test_parity import computing_in, reference
from tests.support import docstrings, input_cases, parity_cases, small, workers
from tests.support import multi_worker_cases as cases
from tests.support.multi_worker_cases import EXACT, Trained, assert_same, averaged_by_hand, keras_fit, plain_fit
from tests.support.workers import results_of
from tests.trainer import test_compute_loss as compute_loss
from tests.trainer import test_metric_entries as metric_entries
from tests.trainer import test_model_methods as model_methods
from tfpar.parity import relative_difference

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    with workers.started("worker_program", tmp_path_factory.mktemp("workers"), 2) as job:
        yield job


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


# --- parity beyond the table


def test_drop_in_trains_a_model_of_tensorflows_own_strategy(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    histories = [model.fit(small.data(), epochs=1, verbose=0).history for _ in range(2)]
    for result in results_of(job, "drop_in"):
        assert_same(result, (histories, cases.state(model)), name="drop-in")


@pytest.mark.parametrize("name", cases.ON_TWO_DEVICES, ids=lambda name: name.replace(" ", "_"))
def test_two_devices_a_worker_equal_one_device(job: workers.Workers, name: str) -> None:
    for results in results_of(job, "two_devices_a_worker"):
        assert_same(results[name], reference(name, "float64"), name=name)


def test_compressed_gradients_train_nearly_the_same_on_all_workers(job: workers.Workers) -> None:
    chiefs, other = results_of(job, "compression")
    expected = plain_fit()
    assert_same(chiefs, expected, 1e-2)
    assert_same(other, chiefs, 0.0)
    assert max(map(relative_difference, chiefs.state, expected.state)) > 1e-6, "they were rounded"


def test_compiled_by_xla(job: workers.Workers) -> None:
    for result in results_of(job, "compiled_by_xla"):
        assert_same(result, plain_fit())


def test_a_model_that_keras_trained_moves_to_the_workers_and_is_compiled_again_there(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    model.fit(small.data(), verbose=0)
    history = model.fit(small.data(), epochs=2, verbose=0).history
    first = Trained(history, cases.state(model))
    expected = first, cases.fine_tuned(model, model.fit), model.evaluate(small.data(), verbose=0)
    for result in results_of(job, "fine_tuned_from_keras"):
        assert_same(result, expected)


def test_eagerly(job: workers.Workers) -> None:
    expected = keras_fit(small.data(), epochs=1)
    for result in results_of(job, "eagerly"):
        assert_same(result, expected)


def test_mixed_precision(job: workers.Workers) -> None:
    expected = keras_fit(small.data(), cases.mixed_precision)
    chiefs, other = results_of(job, "mixed_precision")
    assert_same(chiefs, expected, 5e-2)  # bfloat16 has 8 bits, and sums of halves round otherwise
    assert_same(other, chiefs, 0.0)


def test_epochs_of_some_steps_of_an_endless_dataset(job: workers.Workers) -> None:
    expected = keras_fit(small.data().repeat(), steps_per_epoch=7, epochs=3)
    for result in results_of(job, "steps_of_an_endless_dataset"):
        assert_same(result, expected)


def test_arrays_with_a_split(job: workers.Workers) -> None:
    features, labels = cases.arrays()
    expected = keras_fit(features, y=labels, batch_size=8, shuffle=False, validation_split=0.2)
    for result in results_of(job, "arrays_and_a_split"):
        assert_same(result, expected)


@pytest.mark.parametrize("name", cases.INPUTS)
@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:`shuffle=True` was passed")
def test_every_worker_takes_its_local_batch_of_batches_from_python_code(job: workers.Workers, name: str) -> None:
    keras.utils.set_random_seed(0)
    case = input_cases.CASES[name]
    model = case.model()
    random.seed(0)
    history = model.fit(**case.arguments(), verbose=0).history
    for result in results_of(job, "inputs"):
        assert_same(result[name], (history, model.get_weights()))


def test_examples_in_docstrings_that_need_a_job_run_in_one(job: workers.Workers) -> None:
    for result in results_of(job, "examples_in_docstrings"):
        assert {name.rpartition(".")[2] for name in result} == set(docstrings.IN_A_JOB)
        assert not any(result.values()), "\n".join(result.values())


# --- parameter averaging


@pytest.mark.parametrize("function", ["averaged_every_step", "averaged_every_step_on_two_devices"])
def test_averaging_every_step_of_plain_sgd_equals_one_device(job: workers.Workers, function: str) -> None:
    expected = keras_fit(cases.equal_parts(), cases.plain_sgd)
    for result in results_of(job, function):
        assert_same(result, expected)


def test_replicas_that_step_alone_may_look_up_rows_in_any_way(job: workers.Workers) -> None:
    expected = keras_fit(parity_cases._tokens(8).take(2), cases.rows_of_all)
    for result in results_of(job, "averaged_rows"):
        assert_same(result, expected)


def test_averaging_every_4_steps_whatever_the_steps_of_a_call(job: workers.Workers) -> None:
    expected = averaged_by_hand(average_optimizer=True)
    chiefs, others = results_of(job, "averaged_every_4")
    for result in (*chiefs, *others):
        assert_same(result.state, expected)
        assert_same(result.history, chiefs[0].history)


def test_averaging_without_the_optimizers_moments(job: workers.Workers) -> None:
    expected = averaged_by_hand(average_optimizer=False)
    chiefs, others = results_of(job, "averaged_every_4_but_the_optimizer")
    for chief, other in zip(chiefs, others, strict=True):
        assert_same(chief.state, expected)
        assert_same(other.state[:4], expected[:4])
        assert relative_difference(other.state[-1], expected[-1]) > EXACT, "each keeps its own"


# --- methods of the model's class


def test_overridden_methods_equal_one_device(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    entries = metric_entries.values_of(metric_entries.build(metric_entries.Derived)())
    loss = keras_fit(
        small.data(), lambda: compute_loss.build(compute_loss.SumsInTraining), validation_data=small.data()
    )
    for result in results_of(job, "overridden_methods"):
        assert_same(result, (entries, loss))


# --- decisions


def test_early_stopping_and_the_rates_plateau_are_decided_alike(job: workers.Workers) -> None:
    expected = keras_fit(
        small.data(), cases.plain_sgd, epochs=12, validation_data=small.data(), callbacks=cases.deciding()
    )
    assert 4 <= len(expected.history["loss"]) < 12, "the training was stopped"
    assert expected.history["learning_rate"][0] > expected.history["learning_rate"][-1], "the rate was lowered"
    for result in results_of(job, "decisions"):
        assert_same(result, expected)


def test_a_stop_on_one_worker_stops_all_at_the_same_step(job: workers.Workers) -> None:
    expected = keras_fit(small.data(), callbacks=[cases.Stop(True, at_step=4)], epochs=1, steps_per_epoch=4)
    for result in results_of(job, "stopped_on_worker_1_in_a_batch"):
        assert_same(result, expected)
    for result in results_of(job, "stopped_on_worker_1_after_an_epoch"):
        assert_same(result, plain_fit())


def test_a_callback_of_one_worker_ends_evaluation_and_prediction_of_all(job: workers.Workers) -> None:
    expected = hooks.of_endless_data(tfpar.Trainer(hooks.build(3), tfpar.SingleDevice(), seed=0), decides=True)
    for result in results_of(job, "ended_by_worker_1"):
        assert_same(result, expected)


def test_an_error_in_a_callback_of_one_worker_ends_all_with_its_reason(job: workers.Workers) -> None:
    first, second = results_of(job, "failed_on_worker_1")
    assert list(first) == list(second) == [hook for _, hook in cases.FAILING_HOOKS]
    assert set(second.values()) == {"KeyError: 'width'"}
    for hook, message in first.items():
        reason = r"ValueError: A callback failed on worker 1 \(127\.0\.0\.1:\d+\) with KeyError: 'width'"
        assert re.fullmatch(reason, message), (hook, message)


def test_a_checkpoint_that_the_chief_cannot_read_or_write_ends_all_workers_with_its_reason(
    job: workers.Workers,
) -> None:
    own, others = results_of(job, "no_checkpoint_on_the_chief")
    for what, reason, message in zip(("Reading", "Writing"), own, others, strict=True):
        start = rf"{what} a checkpoint failed on worker 0 \(127\.0\.0\.1:\d+\) with \w+: "
        assert re.fullmatch(start + re.escape(reason), message), (message, reason)


def test_an_interruption_of_one_worker_stops_all_with_a_checkpoint(job: workers.Workers) -> None:
    results = results_of(job, "interrupted_on_worker_1")
    assert [int(state[4]) for (_, state), _ in results] == [13, 13]
    assert [is_interrupted for _, is_interrupted in results] == [True, True]
    assert_same(results[1][0].state, results[0][0].state, 0.0)
    assert [path.name for path in (job.folder / "interrupted").iterdir()] == ["step-00000013.npz"]


def test_a_signal_to_one_worker_ends_all_at_the_same_step_with_a_checkpoint(job: workers.Workers) -> None:
    assert results_of(job, "signalled_on_worker_1") == [(130, 4), (130, 4)]
    assert [path.name for path in (job.folder / "signalled").iterdir()] == ["step-00000004.npz"]


def test_one_device_resumes_from_the_workers_checkpoint(job: workers.Workers) -> None:
    results_of(job, "interrupted_on_worker_1")
    resumed, undisturbed = (tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0) for _ in range(2))
    fit = {"epochs": 3, "verbose": 0}
    checkpoints = tfpar.Checkpoints(job.folder / "interrupted")
    history = resumed.fit(small.shuffled(), **fit, checkpoints=checkpoints).history
    assert_same(history, undisturbed.fit(small.shuffled(), **fit).history)
    assert_same(cases.state(resumed.model), cases.state(undisturbed.model))


def test_metrics_do_not_depend_on_when_checkpoints_are_written(job: workers.Workers) -> None:
    """Equal to the last digit: a resumed run restores the metric sum of each replica."""
    for few, many, resumed in results_of(job, "with_few_and_many_checkpoints"):
        assert few == many
        assert few == resumed


def test_a_loss_that_is_not_finite_is_an_error_on_all(job: workers.Workers) -> None:
    for result in results_of(job, "not_finite"):
        assert result is not None
        assert "at step 3 (step 3 of epoch 1)" in result


def test_all_continue_after_a_loss_that_is_not_finite(job: workers.Workers) -> None:
    for history, state in results_of(job, "continued_after_not_finite"):
        assert np.isnan(history["loss"]).all()
        assert int(state[4]) == 5, "the iterations of the optimizer"


# --- files


def test_stock_callbacks_write_on_the_chief_alone(job: workers.Workers) -> None:
    expected = keras_fit(small.data(), validation_data=small.data())
    for result, left in results_of(job, "writing"):
        assert_same(result, expected)
        assert left == [name for name in left if name.endswith(".result")], "nothing else in the current folder"
    folder = job.folder / "written"
    assert {path.name for path in folder.iterdir()} == {
        *("epoch-1.keras", "epoch-2.keras", "step.weights.h5", "log.csv", "board", "backup", "metrics.jsonl")
    }
    loaded = keras.models.load_model(folder / "epoch-2.keras")
    assert_same(loaded.get_weights(), expected.state[:4])
    rows = list(csv.DictReader((folder / "log.csv").open()))
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(expected.history["val_loss"], rel=EXACT)
    assert {path.name for path in (folder / "board").iterdir()} == {"train", "validation"}


def test_backup_and_restore_resumes_at_the_chiefs_epoch(job: workers.Workers) -> None:
    results_of(job, "writing")
    expected = keras_fit(small.data(), epochs=4)
    for result in results_of(job, "restored"):
        assert_same(result.state, expected.state)
        assert_same(result.history, {name: values[2:] for name, values in expected.history.items()})


def test_the_chief_alone_saves_the_model_for_plain_keras(job: workers.Workers) -> None:
    results = results_of(job, "saved")
    loaded = keras.models.load_model(job.folder / "saved" / "model.keras")
    for weights in results:
        assert_same(weights, loaded.get_weights(), 0.0)
    assert os.listdir(job.folder / "saved") == ["model.keras"]


# --- evaluate and predict


def test_evaluate_and_predict_equal_one_device(job: workers.Workers) -> None:
    expected = cases.evaluate_and_predict(None)
    for results in results_of(job, "evaluated_and_predicted"):
        for name, result in results.items():
            assert_same(result, expected, name=name)
            for key, output in expected["predict many outputs"].items():
                assert result["predict many outputs"][key].dtype == output.dtype, key


def test_methods_of_the_model_in_callbacks_equal_one_device(job: workers.Workers) -> None:
    expected = model_methods.of_keras()
    for results in results_of(job, "methods_of_the_model"):
        for result in results.values():
            model_methods.assert_equal(result, expected)


def test_a_worker_may_predict_alone(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    expected = small.build_model().predict(parity_cases.inputs(7), verbose=0)
    assert_same(results_of(job, "prediction_on_worker_1_alone")[1], expected)


def test_train_on_batch_is_refused(job: workers.Workers) -> None:
    for result in job.results("train_on_batch"):
        assert isinstance(result, workers.Raised)
        assert result.message.startswith("train_on_batch is Keras' own, which does not run in a job"), result.trace


# --- shards


@pytest.mark.parametrize("kind", cases.SHARDED, ids=lambda kind: kind.replace(" ", "_"))
def test_shards_that_workers_read_apart_train_as_on_one_device(job: workers.Workers, kind: str) -> None:
    trainer = tfpar.Trainer(cases.sharded_model(kind), tfpar.SingleDevice(), seed=0)
    expected = cases.with_shards(kind, trainer)
    for results in results_of(job, f"sharded {kind}"):
        for name, result in results.items():
            assert_same(result, expected, name=name)


# --- workers that are not alike


def test_workers_that_call_different_methods_are_refused_and_train_on(job: workers.Workers) -> None:
    for messages, result in results_of(job, "other_calls"):
        for message, verb in zip(messages, ("evaluate", "predict", "build"), strict=True):
            assert f"worker 1 calls fit where the chief calls {verb}. Call each on every worker" in message
        assert_same(result, keras_fit(small.data()))


def test_fit_of_the_model_is_that_of_the_trainer(job: workers.Workers) -> None:
    for result in results_of(job, "fit_of_the_model"):
        assert_same(result, keras_fit(small.data(), epochs=2))


def test_a_model_function_that_calls_methods_of_keras_is_refused(job: workers.Workers) -> None:
    for messages in results_of(job, "model_function_that_calls_keras"):
        for message, name in zip(messages, ("fit", "evaluate", "predict"), strict=True):
            assert f"A model function cannot call {name} in a job of several workers" in message


def test_data_that_workers_read_in_parts_are_refused_before_the_first_step(job: workers.Workers) -> None:
    for messages in results_of(job, "data_in_parts"):
        assert len(messages) == 3, "fit, evaluate and predict"
        for message in messages:
            assert "worker 1 has read another batch than the chief in step 1" in message, message


def test_other_data_to_predict_on_a_worker_are_refused(job: workers.Workers) -> None:
    results = results_of(job, "other_data_to_predict")
    for messages, outputs in results:
        of_arrays, of_generator = messages
        assert "the data ('1 steps with batches of 8 examples' instead of '2 steps with batches of 8" in of_arrays
        assert "worker 1 has read another batch than the chief in step 1" in of_generator
        np.testing.assert_array_equal(outputs, results[0][1])


def test_files_in_another_order_on_a_worker_are_refused(job: workers.Workers) -> None:
    for messages in results_of(job, "other_order_of_files"):
        assert len(messages) == 2, "fit and predict"
        for message in messages:
            assert "the files or examples of its shards, or their order ('3' instead of '0')" in message


def test_random_numbers_may_differ_and_a_warning_says_where_the_order_is_unknown(job: workers.Workers) -> None:
    chiefs, other = results_of(job, "drawn_batches")
    assert chiefs.pop("random targets") == [cases.UNKNOWN_ORDER]
    assert not any([*chiefs.values(), *other.values()])


def test_the_chiefs_weights_count(job: workers.Workers) -> None:
    for result in results_of(job, "other_weights"):
        assert_same(result, plain_fit())


def test_the_chiefs_weights_count_for_evaluate_and_predict_too(job: workers.Workers) -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    expected = model.evaluate(small.data(), verbose=0), model.predict(parity_cases.inputs(7), verbose=0)
    for result in results_of(job, "other_weights_to_evaluate"):
        assert_same(result, expected)


def test_other_learning_rates_and_statistics_are_an_error_on_all(job: workers.Workers) -> None:
    for of_rates, of_statistics in results_of(job, "other_rates_and_statistics"):
        assert of_rates.startswith("All workers must train with one learning rate, and it is 0."), of_rates
        assert "0.075 in the mean of all" in of_rates
        assert of_statistics.startswith("All workers must end with equal weights"), of_statistics


def test_data_that_workers_divide_by_their_rank_are_refused(job: workers.Workers) -> None:
    for messages in results_of(job, "data_divided_by_rank"):
        for name, message in messages.items():
            assert "worker 1 has read another batch than the chief in step 1 of the epoch" in message, name


def test_workers_that_read_in_other_orders_are_refused(job: workers.Workers) -> None:
    """They trained on some examples twice and left out others."""
    for messages in results_of(job, "other_orders"):
        for name, message in messages.items():
            step = "4 of the epoch" if name in ("fit", "validation", "evaluate", "predict") else ""
            assert f"worker 1 has read another batch than the chief in step {step}" in message, name


def test_an_evaluation_by_the_chief_alone_is_refused_on_all(job: workers.Workers) -> None:
    for message in results_of(job, "evaluation_by_the_chief_alone"):
        assert "worker 1 calls none where the chief calls evaluate. Call each on every worker" in message


def test_a_model_in_the_scope_trains_and_predicts_by_its_own_methods(job: workers.Workers) -> None:
    model = small.initial_model()
    before = model.predict(parity_cases.inputs(7), verbose=0)
    history = model.fit(small.data(), verbose=0).history
    after = model.predict(parity_cases.inputs(7), verbose=0)
    for rank, result in enumerate(results_of(job, "methods_in_a_scope")):
        assert_same(result, (history, [before, after][rank:]))


def test_results_of_metrics_in_callbacks_are_those_of_all_workers(job: workers.Workers) -> None:
    for result in results_of(job, "results_in_callbacks"):
        for logs, results in result:
            assert_same(logs, results)


def test_every_worker_may_save_the_same_files(job: workers.Workers) -> None:
    for names in results_of(job, "files_of_every_worker"):
        assert names == ["model.keras", "model.weights.h5"]


def test_other_versions_are_an_error_on_all(job: workers.Workers) -> None:
    for result in results_of(job, "other_versions"):
        assert result is not None
        assert result.startswith("All workers must be equal, and worker 1 (127.0.0.1:")
        assert f"Keras' version ('2.0' instead of '{keras.__version__}')" in result


def test_other_numbers_of_devices_are_an_error_on_all(job: workers.Workers) -> None:
    for result in results_of(job, "other_numbers_of_devices"):
        assert result is not None
        assert result.startswith("All workers must be equal, and worker 1 (127.0.0.1:")
        assert "number of devices ('1' instead of '2')" in result


def test_other_models_are_an_error_on_all_and_nobody_waits_for_ever(job: workers.Workers) -> None:
    for result in results_of(job, "other_models"):
        assert result is not None
        assert result.startswith("All workers must be equal, and worker 1 (127.0.0.1:")
        assert "the model ('weights/sequential/dense/kernel" in result
    for result in results_of(job, "after_other_models"):
        assert_same(result, plain_fit())


def test_data_that_end_early_on_one_worker_are_an_error_on_all(job: workers.Workers) -> None:
    """The others waited without end for its part of the next step."""
    for messages, after in results_of(job, "data_that_end_early_on_worker_1"):
        assert len(messages) == 3, "fit, evaluate and predict"
        for message in messages:
            assert message.startswith("All workers must be equal, and worker 1 (127.0.0.1:")
            assert "the end of the data ('3 batches in an epoch'" in message
        assert_same(after, plain_fit())


def test_a_model_function_that_fails_on_one_worker_is_an_error_on_all_who_train_on(job: workers.Workers) -> None:
    (chiefs, chiefs_next), (own, own_next) = results_of(job, "model_function_that_fails_on_worker_1")
    assert own == ["KeyError: 'vocabulary'"] * 2
    assert len(chiefs) == 2
    for message in chiefs:
        assert message.startswith("ValueError: The model function failed on worker 1 (127.0.0.1:")
        assert message.endswith(") with KeyError: 'vocabulary'")
    for result in (chiefs_next, own_next):
        assert_same(result, plain_fit())


def test_strategies_are_created_one_after_another(job: workers.Workers) -> None:
    for rank, descriptions in enumerate(results_of(job, "many_strategies")):
        assert len(descriptions) == 20
        assert descriptions[0] == f"MultiWorker over 2 workers, 4 replicas; this is worker {rank} on CPU:0, CPU:1"
        assert descriptions[1] == f"MultiWorker over 2 workers, 2 replicas; this is worker {rank} on CPU:0"
        # TensorFlow says this where it takes the collectives of the strategies before away.
        assert "Enabling collective ops after program startup" not in (job.folder / f"{rank}.out").read_text()


def test_the_workers_end_without_error(job: workers.Workers) -> None:
    results_of(job, "many_strategies")
    assert job.finish() == [0, 0]

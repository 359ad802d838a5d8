"""`MultiWorker(shard="optimizer")`: the bits of the unsharded result, and each slot on one worker alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import checkpoint_matrix, small, workers
from tests.support.shard_cases import CASES_HERE, OVER_WORKERS, REFUSED, STAGED, TRAININGS
from tests.support.workers import results_of

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    with workers.started("worker_program_shards", tmp_path_factory.mktemp("workers"), 2) as job:
        yield job


def assert_same_bits(results: list[Any]) -> None:
    """Assert the same history and state without and with shards, divided slots, and equal weights on all replicas."""
    whole, of_shards = results[0]
    assert all(of_worker[0] == whole[0] for _, of_worker in results)
    small.assert_same_state(of_shards[2], whole[2])
    assert whole[3] == (0, 0)
    num_divided = of_shards[3][0]
    held = [divided - elsewhere for divided, elsewhere in (of_worker[3] for _, of_worker in results)]
    assert sum(held) == num_divided
    assert num_divided or len(whole[2]) <= 8, "without slots: six weights, the step and the learning rate"
    for memories in zip(*(of_worker[1] for _, of_worker in results), strict=True):
        for memory in itertools.chain(*memories):
            np.testing.assert_array_equal(memory, memories[0][0])


@pytest.mark.parametrize("name", OVER_WORKERS, ids=lambda name: name.replace(" ", "_"))
def test_weights_state_and_logs_are_those_of_unsharded_workers_bit_for_bit(job: workers.Workers, name: str) -> None:
    assert_same_bits([result[name] for result in results_of(job, "optimizers")])


@pytest.mark.parametrize("name", CASES_HERE[::3], ids=lambda name: name.replace(" ", "_"))
def test_lookups_and_objectives_keep_their_bits(job: workers.Workers, name: str) -> None:
    assert_same_bits([result[name] for result in results_of(job, "cases")])


@pytest.mark.parametrize("function", TRAININGS)
def test_one_weight_two_devices_swapped_averages_and_a_trained_model_keep_the_bits(
    job: workers.Workers, function: str
) -> None:
    assert_same_bits(results_of(job, function))


@pytest.mark.parametrize("name", STAGED, ids=lambda name: name.replace(" ", "_"))
def test_the_state_of_each_stage_is_divided_over_the_workers_with_the_bits_of_unsharded_ones(
    job: workers.Workers, name: str
) -> None:
    assert_same_bits([result[name] for result in results_of(job, "stages")])


def test_replicas_and_stages_send_the_new_weights_in_addition_to_the_gradients(job: workers.Workers) -> None:
    for result in results_of(job, "sent"):
        for without, of_shards in result:
            assert without > 4 * 8 * 32 * 32, "all gradients"
            assert of_shards < 1.6 * without, "half of the bytes of an all-reduce"


@pytest.mark.parametrize("number", [0, 1], ids=["one_device", "two_devices,_small_messages"])
def test_xla_keeps_the_bits(job: workers.Workers, number: int) -> None:
    assert_same_bits([result[number] for result in results_of(job, "compiled")])


@pytest.mark.extended
def test_three_workers_keep_the_bits(tmp_path: Path) -> None:
    with workers.started("worker_program_shards", tmp_path, 3, "cases") as three:
        results = results_of(three, "cases")
        for name in results[0]:
            assert_same_bits([result[name] for result in results])


def test_a_run_of_stages_ends_without_stages_and_the_other_way_round(job: workers.Workers, tmp_path: Path) -> None:
    history, expected = checkpoint_matrix.end(tfpar.SingleDevice(), tmp_path)
    for rank, ended in enumerate(results_of(job, "resumed")):
        for found, state in ended:
            small.assert_same_history(found, history)
            assert rank or len(state) == len(expected)
            small.assert_same_state(state, expected[: len(state)], 1e-5)


def test_each_worker_holds_its_slots_alone_and_the_chief_saves_all(job: workers.Workers) -> None:
    (chiefs, of_chief, state, results, _), (others, of_other, none, of_others, described) = results_of(job, "saved")
    assert none is None
    assert results[0] == of_others[0]
    np.testing.assert_array_equal(results[1], of_others[1])
    assert described.startswith("MultiWorker over 2 workers, 2 replicas, optimizer state sharded; this is worker 1")
    trained = keras.models.load_model(job.folder / "model.keras")
    of_epoch = keras.models.load_model(job.folder / "epoch.keras")
    small.assert_same_state(small.state(trained), state)
    small.assert_same_state(small.state(of_epoch)[6:], state[6:])  # the weights of `epoch` are not averages yet
    slots = {number for number, slot in enumerate(trained.optimizer.variables) if len(slot.shape)}
    assert {*chiefs} & {*others} & slots == set()
    assert {*chiefs, *others} >= slots
    num_bytes = 4 * trained.count_params()
    shared = 8 + 4  # iterations and learning rate
    assert sum(of_chief + of_other) == 4 * num_bytes + 3 * num_bytes + 2 * shared
    assert max(of_chief + of_other) < 4 * num_bytes


def test_a_slot_of_another_worker_is_neither_read_nor_changed(job: workers.Workers) -> None:
    for rank, (read, changed, gathered) in enumerate(results_of(job, "reads_alone")):
        assert re.match(f"Worker {1 - rank} alone holds 'adam_w.*, and this worker cannot read it. Save with", read)
        assert "this worker cannot change it" in changed
        assert "No such file or directory: '/nowhere" in gathered


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_a_worker_cannot_do_alone_is_refused_before_the_first_step(job: workers.Workers, sentence: str) -> None:
    for result in results_of(job, "refused"):
        assert re.search(sentence, result[sentence])


def test_workers_with_different_owners_are_refused(job: workers.Workers) -> None:
    for result in results_of(job, "frozen_on_one_worker"):
        assert result.startswith("All workers must be equal, and worker 1")


def test_state_that_begins_with_weights_needs_workers_with_the_same(job: workers.Workers) -> None:
    for refused, accepted in results_of(job, "begins_with_other_weights"):
        assert re.search(
            "differs from the chief in the initial weights, with which the optimizer's state begins", refused
        )
        assert accepted == ""

"""Models that need more than a sum of dense gradients, over two workers: one device's results, or a clear refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import tfpar
from tests.support import category_cases, small, workers
from tests.support.worker_program_replicas import (
    OTHER_DATA,
    REFUSED_ALONE,
    TRAINED,
    UNREADABLE,
    evaluated,
    predict,
    train,
)
from tfpar.parity import relative_difference

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workers.Workers]:
    with workers.started("worker_program_replicas", tmp_path_factory.mktemp("replicas"), 2) as started:
        yield started


@pytest.mark.parametrize("name", TRAINED)
def test_two_workers_equal_one_device(job: workers.Workers, name: str) -> None:
    history, state = train(tfpar.SingleDevice(), *TRAINED[name])
    for result in job.results(name):
        assert not isinstance(result, workers.Raised), result.trace
        small.assert_same_history(result[0], history)
        for actual, expected in zip(result[1], state, strict=True):
            assert relative_difference(actual, expected) <= 1e-5


def test_predictions_of_the_whole_batch_equal_one_device(job: workers.Workers) -> None:
    expected = predict(tfpar.SingleDevice())
    for result in job.results("predict"):
        assert not isinstance(result, workers.Raised), result.trace
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_every_worker_refuses_batch_dependent_layers(job: workers.Workers) -> None:
    for result in job.results("refused"):
        assert isinstance(result, workers.Raised)
        assert (
            "where an example depends on the others of its batch; set batch_dependent_layers='gather'" in result.message
        )


@pytest.mark.parametrize(("source", "shard_by"), category_cases.CASES)
def test_columns_of_words_over_two_workers_and_a_resumption_equal_one_device(
    job: workers.Workers, source: str, shard_by: str
) -> None:
    history, state = category_cases.train(tfpar.SingleDevice(), source, shard_by)
    for result in job.results(f"words: {source} by {shard_by}"):
        assert not isinstance(result, workers.Raised), result.trace
        assert result[0]["loss"][-1] == pytest.approx(history["loss"][-1], rel=1e-5)
        for actual, expected in zip(result[1], state, strict=True):
            assert relative_difference(actual, expected) <= 1e-5


def test_layers_that_mix_in_inference_are_gathered_there_or_refused_on_every_worker(job: workers.Workers) -> None:
    history, outputs = evaluated(tfpar.SingleDevice())
    for result in job.results("gathered in inference"):
        assert not isinstance(result, workers.Raised), result.trace
        small.assert_same_history(result[0], history)
        np.testing.assert_allclose(result[1], outputs, rtol=1e-5, atol=1e-6)
    for result in job.results("refused in inference"):
        assert isinstance(result, workers.Raised)
        assert "'centred' in inference, where an example depends on the others" in result.message


def test_mirrored_in_a_worker_of_a_job_is_refused(job: workers.Workers) -> None:
    """TensorFlow 2.21 ends the process by SIGSEGV: it lists no device by a local name there."""
    for result in job.results("mirrored"):
        assert isinstance(result, workers.Raised)
        assert "Use MultiWorker here" in result.message


@pytest.mark.parametrize("kind", OTHER_DATA)
def test_all_workers_raise_one_sentence_for_data_that_one_of_them_refuses(job: workers.Workers, kind: str) -> None:
    results = job.results(f"other data: {kind}")
    messages = [result.message.split("\n") for result in results if isinstance(result, workers.Raised)]
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert len(messages[0]) == 2, "neither fit nor evaluate takes them"


@pytest.mark.parametrize("kind", REFUSED_ALONE)
def test_all_workers_refuse_a_loss_that_one_of_them_recognizes(job: workers.Workers, kind: str) -> None:
    """The others waited for its next message until their time limit."""
    results = job.results(f"refused alone: {kind}")
    messages = [result.message for result in results if isinstance(result, workers.Raised)]
    assert len(messages) == 2
    assert messages[0] == messages[1]
    assert "over the batch" in messages[0] or "must not depend on which other examples" in messages[0]


@pytest.mark.parametrize("name", UNREADABLE)
def test_the_others_name_the_worker_that_cannot_read_its_data_and_the_reason(job: workers.Workers, name: str) -> None:
    chiefs, own = job.results(f"unreadable {name}")
    assert re.fullmatch(r"ValueError: Worker 1 \(127\.0\.0\.1:\d+\) failed: data/7\.png is broken\.", chiefs)
    assert own.startswith("InvalidArgumentError: ")

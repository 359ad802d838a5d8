"""Workers with different numbers of devices, and shares of the batch by speed, train as one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import pytest

import tfpar
from tests.properties.test_parity import CASES, computing_in
from tests.support import multi_worker_cases as cases
from tests.support import own_step_cases, parity_cases, small, workers
from tests.support.multi_worker_cases import EXACT, assert_same
from tests.support.verdict_layers import Similar
from tests.support.verdict_losses import contrast

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


class Uneven(NamedTuple):
    """A training under uneven workers.

    Args:
        num_devices: Number of devices of each worker.
        settings: Arguments of `MultiWorker`.
        build: The model function.
        data: The global batches.
    """

    num_devices: tuple[int, int]
    settings: Mapping[str, Any] = MappingProxyType({})
    build: Callable[[], keras.Model] = small.build_model
    data: Callable[[], Any] = small.data

    def strategy(self) -> tfpar.MultiWorker:
        """Return the strategy of this worker."""
        return tfpar.MultiWorker(["CPU:0", "CPU:1"][: self.num_devices[workers.rank()]], **self.settings)


def similar() -> keras.Model:
    """Return a model with a layer that compares all examples of a batch."""
    return parity_cases.classifier(layers=lambda: [Similar()])()


def wide() -> keras.Model:
    """Return a model of which a worker sends the factors of a gradient."""
    model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(256, "relu") for _ in range(2))])
    model.add(keras.layers.Dense(3))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def few() -> Any:
    """Return batches of 8 examples, and a last one of 2, fewer than there are replicas."""
    return parity_cases.batches(42, 8)


TRAINED = {
    "2 and 1 devices, optimizer sharded": Uneven((2, 1), {"shard": "optimizer"}, CASES["global_clipnorm"].build, few),
    "1 and 2 devices": Uneven((1, 2), data=few),
    "1 and 2 devices, sufficient factors": Uneven((1, 2), {}, wide, few),
    "2 and 1 devices, averages of every step": Uneven(
        (2, 1), {"sync": "average"}, cases.plain_sgd, lambda: parity_cases.batches(48, 6)
    ),
    "1 and 2 devices, sparse rows": Uneven((1, 2), {}, parity_cases.lookups, lambda: parity_cases._tokens(11)),
    "2 and 1 devices, gathered": Uneven((2, 1), {"batch_dependent_layers": "gather"}, similar),
    "2 and 1 devices, loss that gathers": Uneven((2, 1), {}, parity_cases.classifier(loss=lambda: contrast)),
    "2 and 1 devices, own train_step": Uneven(
        (2, 1), {}, own_step_cases.CASES["guide"].build, own_step_cases.CASES["guide"].data
    ),
    "shares of workers": Uneven((1, 1), {"batch_shares": [3, 1]}, data=few),
    "shares of workers with 2 and 1 devices": Uneven((2, 1), {"batch_shares": [1, 2]}, data=few),
    "shares of devices": Uneven((2, 1), {"batch_shares": [1, 4, 2], "shard": "optimizer"}),
    "shares of workers, gathered": Uneven(
        (1, 1), {"batch_shares": [1, 3], "batch_dependent_layers": "gather"}, similar
    ),
    "shares of shards": Uneven((1, 1), {"batch_shares": [3, 1]}, data=cases.SHARDED["by file, uneven"]),
    "shares of shards, optimizer sharded": Uneven(
        (2, 1), {"batch_shares": [2, 6], "shard": "optimizer"}, data=cases.SHARDED["by example, uneven"]
    ),
}


def results(trainer: tfpar.Trainer, data: Callable[[], Any]) -> dict[str, Any]:
    """Return the results of `fit`, `evaluate` and `predict`."""
    history = trainer.fit(data(), epochs=2, verbose=0, validation_data=data()).history
    state = cases.state(trainer.model) if trainer.strategy.layout.shard is None else trainer.model.get_weights()
    evaluated = trainer.evaluate(data(), verbose=0, return_dict=True)
    return {"fit": history, "state": state, "evaluate": evaluated, "predict": trainer.predict(data(), verbose=0)}


def train(name: str) -> dict[str, Any]:
    uneven = TRAINED[name]
    return results(tfpar.Trainer(uneven.build, uneven.strategy(), seed=0), uneven.data)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TRAINED)
def test_uneven_workers_equal_one_device(job: workers.Job, name: str) -> None:
    call = job.start(train, name)
    expected = results(tfpar.Trainer(TRAINED[name].build, tfpar.SingleDevice(), seed=0), TRAINED[name].data)
    for result in call.results():
        assert_same(result, {**expected, "state": expected["state"][: len(result["state"])]}, EXACT, name)


def train_with_divided_weights() -> list[Any]:
    trainer = tfpar.Trainer(small.build_model, tfpar.MultiWorker(shard="weights"), seed=0)
    return [trainer.strategy.num_replicas, results(trainer, few)]


@pytest.mark.extended
def test_weights_divided_over_uneven_workers_equal_one_device() -> None:
    with workers.started(num_cpus=[2, 1]) as job:
        num_replicas, result = job.run_on_chief(train_with_divided_weights)
    assert num_replicas == 3
    expected = results(tfpar.Trainer(small.build_model, tfpar.SingleDevice(), seed=0), few)
    assert_same(result, {**expected, "state": expected["state"][: len(result["state"])]})


def train_to_a_checkpoint(
    folder: Path, num_devices: tuple[int, int], interrupted_at: int
) -> tuple[int, dict[str, list[float]]]:
    """Train until a step, or to the end from a checkpoint; return the number of steps and the history."""
    trainer = tfpar.Trainer(small.build_model, Uneven(num_devices, {"shard": "optimizer"}).strategy(), seed=0)
    steps: list[int] = []
    callbacks = [
        cases.Interrupt(trainer if interrupted_at else None, interrupted_at),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch)),
    ]
    checkpoints = tfpar.Checkpoints(folder, every_seconds=1000)
    history = trainer.fit(small.data(), epochs=2, verbose=0, callbacks=callbacks, checkpoints=checkpoints).history
    return len(steps), history


@pytest.mark.extended
def test_uneven_workers_resume_a_run_of_others_with_the_results_of_one_device(job: workers.Job, tmp_path: Path) -> None:
    for num_steps, _ in job.run(train_to_a_checkpoint, tmp_path, (2, 1), 13):
        assert num_steps == 13
    for num_steps, history in job.run(train_to_a_checkpoint, tmp_path, (1, 2), 0):
        assert num_steps == 7
        assert_same(history, cases.plain_fit().history)


def fit_shards() -> None:
    strategy = Uneven((2, 1)).strategy()
    sharded = tfpar.data.by_example(cases._rows(0, 80), global_batch_size=8, num_shards=8)
    trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
    trainer.fit(sharded, epochs=1, verbose=0)


def test_shards_that_do_not_divide_by_the_devices_of_workers_are_refused(job: workers.Job) -> None:
    for result in job.outcomes(fit_shards):
        assert result.kind == "ValueError"
        assert "as the batch shares of the workers, 2 : 1, but there are 8 shards: use another" in result.message

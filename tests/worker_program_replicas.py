"""What a worker runs for test_replicas_multi_process.py: models that need more than a sum of dense gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tfpar
from tests import multi_worker_cases as cases
from tests import objective_cases, parity_cases, small, workers
from tests.test_losses_in_call import pairs, weighted, with_endpoint
from tests.test_mixing_replicas import MIXING, Gathers, with_layer
from tests.test_scalar_losses import contrast, mean, mean_accuracy, total, two_outputs, with_loss
from tests.test_slices import embedding, tokens

TRAINED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "centred": (MIXING["centred"], small.data),
    "own call": (MIXING["own"], small.data),
    "gathers by itself": (with_layer(lambda x: Gathers()(x)), cases.SHARDED["by example, uneven"]),
    "loss in a layer": (with_endpoint(weighted(), loss=None), pairs),
    "rows": (parity_cases.lookups, lambda: parity_cases._tokens(11)),
    "rows of bfloat16": (embedding("bfloat16"), tokens),
    "rows of float16 scaled": (embedding("mixed_float16"), tokens),
    "scalar loss and metric": (with_loss(mean, metrics=[mean_accuracy]), small.data),
    "scalar loss, sharded": (with_loss(mean), cases.SHARDED["by example, uneven"]),
    "scalar sum, chief without data": (with_loss(total), cases.SHARDED["by file, worker 0 has nothing"]),
    "scalar loss that gathers": (with_loss(contrast), small.data),
    "scalars of two outputs": (two_outputs, parity_cases.two_outputs_data(as_dict=True)),
    "contrastive": (objective_cases.contrastive, objective_cases.views),
}


def train(strategy: tfpar.Strategy, build: Callable[[], Any], dataset: Callable[[], Any]) -> tuple[Any, Any]:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    return trainer.fit(dataset(), epochs=2, verbose=0).history, cases.state(trainer.model)


def predict(strategy: tfpar.Strategy) -> Any:
    return tfpar.Trainer(MIXING["similar"], strategy, seed=0).predict(parity_cases.inputs(19), 9, verbose=0)


def refused(strategy: tfpar.Strategy) -> None:
    train(strategy, MIXING["mean"], small.data)


def main() -> None:
    strategy = tfpar.MultiWorker()
    gathering = tfpar.MultiWorker(mixing="gather")
    questions = {name: functools.partial(train, gathering, *given) for name, given in TRAINED.items()}
    others = {"predict": functools.partial(predict, gathering), "refused": functools.partial(refused, strategy)}
    workers.answer_all({**questions, **others})


if __name__ == "__main__":
    main()

"""The experiment `vocabulary_loss`: memory of the loss of 50,000 classes, from scores in pieces and gathered.

    python -m benchmarks vocabulary_loss

Logical CPUs share the memory of the process, so the figures are those of both devices together.
"""

from __future__ import annotations

import dataclasses

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output
from benchmarks.pipelines.figures import ratio


@dataclasses.dataclass(frozen=True)
class LastLayer:
    """What one process trains with SGD: Dense(50,000) on 16 features, batch 16, context 256, in 2 shards.

    Args:
        gathers: Whether Keras' loss and metric read the gathered scores, as without tfpar's.
        counts_accuracy: Whether the accuracy is counted.
    """

    gathers: bool
    counts_accuracy: bool


def measure(setting: LastLayer) -> Output:
    """Return the most bytes of a step above those before it, and the bytes of all scores.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.vocabulary_loss_worker", {"setting": vars(setting)})


def _name(setting: LastLayer) -> str:
    return f"{'gathered' if setting.gathers else 'in pieces'}{', accuracy' * setting.counts_accuracy}"


_SETTINGS = {
    _name(one): one for one in (LastLayer(gathers, counts) for counts in (True, False) for gathers in (True, False))
}

VOCABULARY_LOSS = Experiment(
    name="vocabulary_loss",
    summary="memory of the loss of a language model with 50,000 classes in 2 shards: scores in pieces, and gathered",
    figure="peak_bytes",
    settings=_SETTINGS,
    measure=measure,
    findings=(
        Finding(
            "gathered / in pieces, with accuracy", ratio("gathered, accuracy", "in pieces, accuracy", "peak_bytes"), 3.0
        ),
        Finding("gathered / in pieces, loss alone", ratio("gathered", "in pieces", "peak_bytes"), 3.0),
        Finding(
            "in pieces, with accuracy: peak / bytes of all scores",
            ratio("in pieces, accuracy", "in pieces, accuracy", "peak_bytes", "scores_bytes"),
        ),
    ),
)

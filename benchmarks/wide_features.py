"""The experiment `wide_features`: a first layer over 10,000,000 features in two shards, against one core.

python -m benchmarks wide_features
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Target
from benchmarks.pipelines.figures import ratio

Kind = Literal["dense", "sparse"]


@dataclasses.dataclass(frozen=True)
class Features:
    """What one process trains with SGD: Dense(10) on 10,000,000 features.

    Args:
        kind: "dense": batch 4. "sparse": batch 256, with 100 features each.
        num_shards: Logical CPUs and cores; with 1 `tfpar.SingleDevice`, else `tfpar.TensorParallel`.
        num_steps: Steps of the timed call of `fit`.
    """

    kind: Kind
    num_shards: int
    num_steps: int = 10


def measure(setting: Features) -> Output:
    """Return the steps per second, and the bytes of the features of a batch that one device receives at most.

    Args:
        setting: What to train.

    Raises:
        WorkerError: If the process fails.
    """
    return process.ask("benchmarks.wide_features_worker", {"setting": vars(setting)})


def _name(kind: Kind, num_shards: int) -> str:
    return f"{'SingleDevice, one core' if num_shards == 1 else f'TensorParallel({num_shards})'}, {kind}"


_KINDS: tuple[Kind, ...] = ("dense", "sparse")

WIDE_FEATURES = Experiment(
    name="wide_features",
    summary="Dense(10) on 10,000,000 features, dense and sparse, divided over two logical CPUs, against one core",
    figure="steps_per_second",
    settings={_name(kind, shards): Features(kind, shards) for kind in _KINDS for shards in (1, 2)},
    measure=measure,
    findings=(
        *(Target((_name(kind, 2),), (_name(kind, 1),), 1.5) for kind in _KINDS),
        *(
            Finding(
                f"{kind}: bytes that a device of two receives / all",
                ratio(_name(kind, 2), _name(kind, 1), "received_bytes"),
                at_most=at_most,
            )
            # The positions of sparse features are random.
            for kind, at_most in (("dense", 0.5), ("sparse", 0.51))
        ),
    ),
)

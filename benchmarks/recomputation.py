"""The experiment `recomputation`: time of a step and peak memory of replicas with and without recomputed layers.

    python -m benchmarks recomputation

Memory is that of a process of two logical CPUs, one replica on each, above what it held before the model.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness import Experiment, Finding, Output
from benchmarks.shards import Shards, measure

_STRATEGIES = {"Mirrored": None, 'Mirrored(shard="weights")': "weights"}
_NUM_STEPS = 6


def _name(strategy: str, recompute: bool) -> str:
    return f"{strategy}{', recomputing' * recompute}"


def _ratio(strategy: str, figure: str, text: str) -> Finding:
    def ratio(outputs: Mapping[str, Output]) -> float:
        return outputs[_name(strategy, True)][figure] / outputs[_name(strategy, False)][figure]

    return Finding(f"{text} with recomputation against without, {strategy}", ratio)


RECOMPUTATION = Experiment(
    name="recomputation",
    summary="The memory and the time of a transformer on two replicas, whose layers are recomputed or not",
    figure="steps_per_second",
    settings={
        _name(strategy, recompute): Shards("transformer", shard, 2, _NUM_STEPS, recompute=recompute)
        for strategy, shard in _STRATEGIES.items()
        for recompute in (False, True)
    },
    measure=measure,
    findings=tuple(
        _ratio(strategy, figure, text)
        for strategy in _STRATEGIES
        for figure, text in (("process_bytes", "peak memory"), ("steps_per_second", "steps per second"))
    ),
)

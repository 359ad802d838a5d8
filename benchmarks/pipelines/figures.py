"""Findings of pipeline experiments: what is computed from the outputs of one round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import Round
from benchmarks.pipelines.setting import Setting

Figure = Callable[[Round], float]


def ratio(above: str, below: str, figure: str, figure_below: str | None = None) -> Figure:
    """Return what computes a ratio of two settings' figures.

    Args:
        above: The setting above the line.
        below: The setting below the line.
        figure: A name in the outputs.
        figure_below: The same for the setting below, where it is another.
    """
    return lambda outputs: outputs[above][figure] / outputs[below][figure_below or figure]


def spread(settings: Sequence[str], figure: str) -> Figure:
    """Return what computes the largest of several settings' figures by the smallest.

    Args:
        settings: Their names.
        figure: A name in the outputs.
    """

    def of(outputs: Round) -> float:
        values = [float(outputs[name][figure]) for name in settings]
        return max(values) / min(values)

    return of


def efficiency(pipelined: str, setting: Setting, one_core: str) -> Figure:
    """Return a function that computes ideal / measured step time, ideal = T/p x (m+p-1)/m for GPipe and 1F1B.

    p stages and m micro-batches have a bubble of (p-1)/(m+p-1), which is part of the ideal; above 1 is an executor that
    fills some of it, with gradients of weights for example.

    Args:
        pipelined: The setting of p stages and m micro-batches.
        setting: The setting itself, for p and m.
        one_core: The setting that measures T: the same step on one device with one core.
    """
    stages, microbatches = setting.num_stages, setting.num_microbatches
    ideal_share = (microbatches + stages - 1) / microbatches / stages
    return lambda outputs: ideal_share * outputs[one_core]["step_seconds"] / outputs[pipelined]["step_seconds"]


def saved_share(setting: str, base: str, figure: str) -> Figure:
    """Return a function that computes the fraction by which a setting's figure is below another's: 0.1 for 10 % less.

    Args:
        setting: The setting that should need less.
        base: The setting to compare with.
        figure: A name in the outputs.
    """
    return lambda outputs: 1 - outputs[setting][figure] / outputs[base][figure]


def saved(setting: str, base: str, figure: str) -> Figure:
    """Return what computes how much less a setting needs than another; what both need cancels out.

    Args:
        setting: The setting that should need less.
        base: The setting to compare with.
        figure: A name in the outputs.
    """
    return lambda outputs: outputs[base][figure] - outputs[setting][figure]


def quotient(above: Figure, below: Figure) -> Figure:
    """Return what divides one figure of a round by another."""
    return lambda outputs: above(outputs) / below(outputs)

"""The order in which a plan measures layouts. Its seconds are for ordering alone, and never shown. Pure Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfpar.layout import Layout
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.schedule.simulator import Durations, simulate

CLOSE = 1.5  # a family whose fastest layout takes longer than this many times the fastest of all is left


def relative_step(layout: Layout) -> float:
    """Return the step of a layout relative to that of one device, if computing were all that takes time.

    Args:
        layout: The layout.

    Example:
        >>> relative_step(Layout(4)), relative_step(Layout(num_stages=2, num_microbatches=4))
        (0.25, 0.625)
    """
    part = 1 / (layout.num_replicas * layout.num_shards)
    if layout.num_stages == 1:
        return part
    third = part / 3 / layout.num_stages / layout.num_microbatches
    each, recomputed = (third,) * layout.num_stages, third * layout.recompute
    durations = Durations(each, (2 * third + recomputed,) * layout.num_stages, each, each, (0.0,) * (len(each) - 1))
    schedule = schedules.make(layout.schedule, layout.num_stages, layout.num_microbatches)
    return round(simulate(schedule, durations).step_seconds, 9)


def next_layout(rest: Collection[Layout], step_seconds: Mapping[Layout, float]) -> Layout | None:
    """Return the layout to measure next; None where those that are left are of slow families.

    The most promising of each family comes first, then others of the families that are close to the fastest.

    Args:
        rest: The layouts that are not measured yet.
        step_seconds: The measured steps.

    Example:
        >>> next_layout([Layout(2, shard="optimizer"), Layout(2)], {Layout(): 1.0})
        Layout(num_replicas=2, ...)
        >>> next_layout([Layout(2, shard="optimizer")], {Layout(): 1.0, Layout(2): 1.6}) is None
        True
    """
    fastest: dict[tuple[str, bool, bool], float] = {}
    for layout, seconds in step_seconds.items():
        fastest[layout.family] = min(seconds, fastest.get(layout.family, seconds))
    least = min(fastest.values(), default=0.0)
    left = [layout for layout in rest if fastest.get(layout.family, 0.0) <= CLOSE * least]
    return min(
        left,
        key=lambda layout: (fastest.get(layout.family, 0.0), relative_step(layout), layout.simplicity),
        default=None,
    )

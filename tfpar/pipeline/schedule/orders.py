"""The order of actions on each device, one pure function per built-in schedule.

`tfpar.pipeline.schedule.make` documents and validates the arguments. In the drawings, a row is a device, a column a
unit of time, and `F2` the forward pass of micro-batch 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.pipeline.schedule.actions import Action, Kind

Orders = tuple[tuple[Action, ...], ...]


def gpipe(num_stages: int, num_microbatches: int) -> Orders:
    """Return the order of GPipe: all forward passes, then all backward passes (arXiv 1811.06965).

        F0 F1 F2 F3 .. .. B0 B1 B2 B3
        .. F0 F1 F2 F3 B0 B1 B2 B3

    The backward passes also start with micro-batch 0, so that every schedule sums gradients in the same order.

    Example:
        >>> print(*gpipe(num_stages=2, num_microbatches=2)[1])
        F1.0 F1.1 B1.0 B1.1
    """
    return tuple(
        _alternate(*_forwards_and_backwards(stage, num_microbatches), num_warmup=num_microbatches)
        for stage in range(num_stages)
    )


def one_forward_one_backward(num_stages: int, num_microbatches: int, more: Sequence[int] = ()) -> Orders:
    """Return the order of 1F1B: alternating forward and backward passes (PipeDream-flush, arXiv 2006.09503).

        F0 F1 .. B0 F2 B1 F3 B2 .. B3
        .. F0 B0 F1 B1 F2 B2 F3 B3

    Stage s warms up with `num_stages - s - 1` forward passes, so at most `num_stages - s` micro-batches are in flight.

    Args:
        num_stages: Number of stages.
        num_microbatches: Number of micro-batches in a step.
        more: Additional warm-up forward passes of each stage. Defaults to zeros.

    Example:
        >>> print(*one_forward_one_backward(num_stages=2, num_microbatches=2)[1])
        F1.0 B1.0 F1.1 B1.1
    """
    return tuple(
        _alternate(*_forwards_and_backwards(stage, num_microbatches), num_warmup=num_stages - stage - 1 + extra)
        for stage, extra in enumerate(more or [0] * num_stages)
    )


def interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> Orders:
    """Return the order of interleaved 1F1B, with several stages on each device (Megatron-LM, arXiv 2104.04473).

    Each device runs micro-batches in groups of `num_devices`: the forward passes of a group on its first stage, then on
    its second, and so on; backward passes in the reverse order of stages (figure 4 of the paper). With two stages on
    each device, the second in lower case:

        F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..

    Example:
        >>> print(*interleaved(num_stages=4, num_microbatches=2, num_devices=2)[1])
        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """

    def in_groups(kind: Kind, stages: Sequence[int]) -> list[Action]:
        return [
            Action(kind, stage, microbatch)
            for first in range(0, num_microbatches, num_devices)
            for stage in stages
            for microbatch in range(first, first + num_devices)
        ]

    orders = []
    for device in range(num_devices):
        stages = range(device, num_stages, num_devices)
        num_warmup = 2 * (num_devices - device - 1) + (len(stages) - 1) * num_devices
        orders.append(_alternate(in_groups("F", stages), in_groups("B", stages[::-1]), num_warmup))
    return tuple(orders)


def _forwards_and_backwards(stage: int, num_microbatches: int) -> tuple[list[Action], list[Action]]:
    microbatches = range(num_microbatches)
    return [Action("F", stage, index) for index in microbatches], [Action("B", stage, index) for index in microbatches]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> tuple[Action, ...]:
    """Return `num_warmup` forward passes, then alternating passes, then the remaining backward passes."""
    num_warmup = min(num_warmup, len(forwards))
    order = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - num_warmup :])


def zero_bubble(num_stages: int, num_microbatches: int) -> Orders:
    """Return the order of ZB-H1: 1F1B with separate weight gradients, which fill the bubble (arXiv 2401.10241).

        F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        .. F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    F and B are in the order of 1F1B. Stage s delays each weight gradient by s micro-batches and runs the last s at the
    end of the step, where 1F1B leaves the device idle. At most `num_stages` micro-batches are in flight, the maximum of
    1F1B. With at least `num_stages` micro-batches and the same times F, B and W on all stages, a device is idle for
    `(num_stages - 1) * (F + B - min(F, B, W))`, instead of `(num_stages - 1) * (F + B + W)` under 1F1B.

    Example:
        >>> print(*zero_bubble(num_stages=2, num_microbatches=2)[1])
        F1.0 B1.0 F1.1 B1.1 W1.0 W1.1
    """
    orders = []
    for stage, forwards_and_backwards in enumerate(one_forward_one_backward(num_stages, num_microbatches)):
        order: list[Action] = []
        for action in forwards_and_backwards:
            order.append(action)
            if action.kind == "B" and action.microbatch >= stage:
                order.append(Action("W", stage, action.microbatch - stage))
        remaining = range(max(num_microbatches - stage, 0), num_microbatches)
        orders.append((*order, *(Action("W", stage, microbatch) for microbatch in remaining)))
    return tuple(orders)

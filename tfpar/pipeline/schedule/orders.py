"""The orders in which the devices of a pipeline run their actions: one pure function a schedule.

Each takes sizes that `tfpar.pipeline.schedule.make` has checked, and returns the actions of every device. In the
drawings a column is a unit of time, a row a device, `F2` the forward of micro-batch 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.pipeline.schedule.actions import Action, Kind

Orders = tuple[tuple[Action, ...], ...]


def gpipe(num_stages: int, num_microbatches: int) -> Orders:
    """Return all forwards, then all backwards (GPipe, arXiv 1811.06965).

        F0 F1 F2 F3 .. .. B0 B1 B2 B3
        .. F0 F1 F2 F3 B0 B1 B2 B3

    Backwards begin with micro-batch 0 too, so that gradients add up in the same order as in every other schedule.
    """
    return tuple(
        _alternate(*_forwards_and_backwards(stage, num_microbatches), num_ahead=num_microbatches)
        for stage in range(num_stages)
    )


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Orders:
    """Return the order that follows each forward by a backward (PipeDream-flush, arXiv 2006.09503).

        F0 F1 .. B0 F2 B1 F3 B2 .. B3
        .. F0 B0 F1 B1 F2 B2 F3 B3

    Stage s runs `num_stages - s - 1` forwards ahead, so that it keeps the activations of at most `num_stages - s`
    micro-batches, however many there are.
    """
    return tuple(
        _alternate(*_forwards_and_backwards(stage, num_microbatches), num_ahead=num_stages - stage - 1)
        for stage in range(num_stages)
    )


def interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> Orders:
    """Return 1F1B over devices that hold several stages each (Megatron-LM, arXiv 2104.04473, figure 4).

    Micro-batches go round in groups of `num_devices`: a group passes through the first stage of a device, then through
    its second, and so on; backwards come through its last stage first. Here with two stages a device, the second one
    in small letters:

        F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..
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
        num_ahead = 2 * (num_devices - device - 1) + (len(stages) - 1) * num_devices
        orders.append(_alternate(in_groups("F", stages), in_groups("B", stages[::-1]), num_ahead))
    return tuple(orders)


def _forwards_and_backwards(stage: int, num_microbatches: int) -> tuple[list[Action], list[Action]]:
    microbatches = range(num_microbatches)
    return [Action("F", stage, index) for index in microbatches], [Action("B", stage, index) for index in microbatches]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> tuple[Action, ...]:
    """Return `num_ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    num_ahead = min(num_ahead, len(forwards))
    order = list(forwards[:num_ahead])
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - num_ahead :])


def zero_bubble(num_stages: int, num_microbatches: int) -> Orders:
    """Return 1F1B with weight gradients as actions of their own, which fill the bubble (ZB-H1, arXiv 2401.10241).

        F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        .. F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    Forwards and backwards keep 1F1B's order. Stage s runs a weight gradient s micro-batches after its backward, and so
    is left with s of them for the end, where it would otherwise wait. It keeps the activations of at most `num_stages`
    micro-batches, 1F1B's maximum. With at least `num_stages` micro-batches and the same times F, B and W on every stage
    a device waits `(num_stages - 1) * (F + B - min(F, B, W))`; under 1F1B `(num_stages - 1) * (F + B + W)`.
    """
    orders = []
    for stage, halves in enumerate(one_forward_one_backward(num_stages, num_microbatches)):
        order: list[Action] = []
        for action in halves:
            order.append(action)
            if action.kind == "B" and action.microbatch >= stage:
                order.append(Action("W", stage, action.microbatch - stage))
        held_back = range(max(num_microbatches - stage, 0), num_microbatches)
        orders.append((*order, *(Action("W", stage, microbatch) for microbatch in held_back)))
    return tuple(orders)

"""The schedules of a pipeline: make a known one, read or check one of your own.

One pure function makes the order in which devices run; the executor, the simulator, the pictures and the tests all
read that one order. No TensorFlow here.
"""

from __future__ import annotations

from tfpar.pipeline.schedule import orders
from tfpar.pipeline.schedule.actions import Schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def make(name: str, num_stages: int, num_microbatches: int, num_devices: int | None = None) -> Schedule:
    """Return one of the known schedules.

    Args:
        name: "gpipe": all forwards, then all backwards. "1f1b": a backward after each forward; with equal times as fast
            as "gpipe", with memory that does not grow with the micro-batches. "interleaved": 1F1B with several stages a
            device; a smaller bubble, more transfers. "zero_bubble": 1F1B with weight gradients as actions of their own,
            which fill the bubble; on every stage at most as many activations as on 1F1B's first.
        num_stages: Stages of the model, at least 1. For "interleaved" a multiple of `num_devices`, at least its double.
        num_microbatches: Micro-batches of a step, at least 1. For "interleaved" a multiple of `num_devices`.
        num_devices: Devices; None for as many as stages, or half as many with "interleaved".

    Raises:
        ValueError: If there is no such schedule, or not with these numbers.

    Example:
        >>> print(make("zero_bubble", num_stages=2, num_microbatches=3).to_text())
        zero_bubble
        0: F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2
        1: F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2
    """
    if name not in NAMES:
        raise ValueError(f"A schedule must be one of {', '.join(NAMES)}, and this one is {name!r}. Choose one of them.")
    for what, number in [("num_stages", num_stages), ("num_microbatches", num_microbatches)]:
        if number < 1:
            raise ValueError(f"A schedule needs {what} of at least 1, and it is {number}. Set a larger one.")
    if name == "interleaved":
        num_devices = num_stages // 2 if num_devices is None else num_devices
        _check_interleaved(num_stages, num_microbatches, num_devices)
        actions = orders.interleaved(num_stages, num_microbatches, num_devices)
        return Schedule(name, num_stages, num_devices, num_microbatches, actions)
    if num_devices not in (None, num_stages):
        raise ValueError(
            f"Schedule {name!r} needs a device for each stage, and there are {num_stages} stages and {num_devices} "
            f"devices. Set num_stages to {num_devices}, or choose schedule 'interleaved'."
        )
    order = {"gpipe": orders.gpipe, "1f1b": orders.one_forward_one_backward, "zero_bubble": orders.zero_bubble}[name]
    return Schedule(name, num_stages, num_stages, num_microbatches, order(num_stages, num_microbatches))


def of_fewer_stages(schedule: Schedule, most: int) -> Schedule:
    """Return a schedule of as many stages as a model has operations, where those are fewer.

    Where "interleaved" would have one stage a device, what is left is "1f1b".

    Args:
        schedule: One of the known ones.
        most: Stages that there can be.

    Example:
        >>> of_fewer_stages(make("gpipe", num_stages=4, num_microbatches=2), 3).num_stages
        3
    """
    if most >= schedule.num_stages:
        return schedule
    name, devices, microbatches = schedule.name, schedule.num_devices, schedule.num_microbatches
    if name != "interleaved":
        return make(name, max(most, 1), microbatches)
    if most >= 2 * devices:
        return make(name, most - most % devices, microbatches, devices)
    return make("1f1b", max(min(most, devices), 1), microbatches)


def _check_interleaved(num_stages: int, num_microbatches: int, num_devices: int) -> None:
    devices = max(num_devices, 1)
    if num_devices < 1 or num_stages % num_devices or num_stages < 2 * num_devices:
        raise ValueError(
            "Schedule 'interleaved' needs equally many stages on every device, at least 2, and there are "
            f"{num_stages} stages and {num_devices} devices. Set num_stages to {2 * devices} or another multiple of "
            f"{devices}, or choose schedule '1f1b'."
        )
    if num_microbatches % num_devices:
        next_multiple = num_microbatches + num_devices - num_microbatches % num_devices
        raise ValueError(
            "Schedule 'interleaved' needs micro-batches in groups of one a device, and there are "
            f"{num_microbatches} micro-batches and {num_devices} devices. Set num_microbatches to {next_multiple} or "
            f"another multiple of {num_devices}, or choose schedule '1f1b'."
        )

"""1F1B with more micro-batches in flight, to hide slow transfers.

1F1B, with transfers                            one more in flight on device 0

F0 F1 ...... B0 F2 ...... B1 F3 ......          F0 F1 F2 B0 F3 B1 F4 B2
...... F0 B0 ...... F1 B1 ...... F2 B2          ...... F0 B0 F1 B1 F2 B2
        device 1 waits for a gradient to arrive         its next input has arrived before it is needed
        and for an input to come back

Each stage before a slow cut saves tensors of one more micro-batch.
"""

from __future__ import annotations

import dataclasses

from tfpar.pipeline.schedule.actions import Schedule
from tfpar.pipeline.schedule.orders import one_forward_one_backward
from tfpar.pipeline.schedule.simulator import Durations, simulate

_MIN_GAIN = 0.001  # fraction of a step


def with_more_in_flight(schedule: Schedule, cuts: tuple[int, ...]) -> Schedule:
    """Return 1F1B with one more micro-batch in flight on all stages before each given cut.

    Args:
        schedule: "1f1b", with any number of replicas.
        cuts: Indices of cuts. Cut c follows stage c.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> print(with_more_in_flight(schedule.make("1f1b", num_stages=2, num_microbatches=4), (0,)).to_text())
        1f1b
        0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
        1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3
    """
    replica = schedule.first_replica
    more = [sum(cut >= stage for cut in cuts) for stage in range(replica.num_stages)]
    actions = one_forward_one_backward(replica.num_stages, replica.num_microbatches, more)
    return dataclasses.replace(replica, actions=actions).replicated(schedule.num_replicas)


def hide_transfers(schedule: Schedule, durations: Durations) -> Schedule:
    """Return 1F1B with more micro-batches in flight where that shortens the simulated step.

    Args:
        schedule: Any schedule. Only "1f1b" changes.
        durations: The durations of its actions and transfers.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> order = schedule.make("1f1b", num_stages=2, num_microbatches=8)
        >>> slow = Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.2,))
        >>> [round(simulate(schedule, slow).step_seconds, 3) for schedule in (order, hide_transfers(order, slow))]
        [28.6, 27.4]
        >>> fast = dataclasses.replace(slow, transfer_seconds=(0.0,))
        >>> hide_transfers(order, fast) == order
        True
    """
    if schedule.name != "1f1b":
        return schedule
    chosen: tuple[int, ...] = ()
    best, best_seconds = schedule, simulate(schedule, durations).step_seconds
    slow = [cut for cut, seconds in enumerate(durations.transfer_seconds) if seconds]
    for cut in reversed(slow):
        other = with_more_in_flight(schedule, (cut, *chosen))
        seconds = simulate(other, durations).step_seconds
        if seconds < (1 - _MIN_GAIN) * best_seconds:
            chosen, best, best_seconds = (cut, *chosen), other, seconds
    return best

"""The experiment `plan_hosts`: layouts of two hosts, planned on one, against the same on two hosts with a slow link.

    python -m benchmarks plan_hosts

The planner measures one host of four devices whose layers sleep; the rate of the link is given. Two workers train each
layout on two hosts with that rate. It needs root, for the hosts.
"""

from __future__ import annotations

import dataclasses

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output
from benchmarks.plan import ratios

MOST_ERROR = 0.08


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A model whose layers sleep, and the link between the hosts.

    Args:
        megabits_per_second: The rate at which a host sends.
        width: Each of eight layers has a weight of this many rows and columns.
        batch: Rows of the global batch, for which a layer sleeps as long in each setting. Workers sum the gradients of
            many rows; of few they send the rows that are multiplied to gradients.
        num_hosts: Hosts, each with four devices.
    """

    megabits_per_second: int
    width: int
    batch: int = 64
    num_hosts: int = 2


@dataclasses.dataclass(frozen=True)
class OneLayout:
    """A layout that a job of workers trains.

    Args:
        hosts: The model and the link.
        number: The number of the layout among those of the worker module; None to plan all of them on one host.
    """

    hosts: dict[str, int]
    number: int | None = None


_MODULE = "benchmarks.plan_hosts_worker"


def measure(setting: Hosts) -> Output:
    """Return the predicted and the measured step of each layout.

    Args:
        setting: The model and the link.

    Raises:
        WorkerError: If a process fails.
        OSError: If this process may not make hosts.
    """
    hosts, rate = dataclasses.asdict(setting), f"{setting.megabits_per_second}mbit"
    (planned,) = process.ask_workers(_MODULE, OneLayout(hosts), 1)
    output: Output = {f"predicted {name}": seconds for name, seconds in planned.items()}
    for number, name in enumerate(planned):
        chief, *_ = process.ask_workers(_MODULE, OneLayout(hosts, number), setting.num_hosts, rate)
        output[f"measured {name}"] = chief["step_seconds"]
    return output | {"largest_error": max(abs(one - 1) for one in ratios({"": output}))}


_SETTINGS = {
    "1 Gbit/s, 2 MB of gradients": Hosts(1000, 256),
    "200 Mbit/s, 2 MB of gradients": Hosts(200, 256),
    "200 Mbit/s, 8 MB of gradients": Hosts(200, 512),
    "200 Mbit/s, 8 MB of gradients, 512 rows": Hosts(200, 512, batch=512),
}

PLAN_HOSTS = Experiment(
    name="plan_hosts",
    summary="Two hosts of four devices that sleep, with a slow link: planned on one host, and trained on both",
    figure="largest_error",
    settings=_SETTINGS,
    measure=measure,
    findings=tuple(
        Finding(
            f"largest error of the predicted step, {name}",
            lambda outputs, name=name: outputs[name]["largest_error"],
            at_most=MOST_ERROR,
        )
        for name in _SETTINGS
    ),
)

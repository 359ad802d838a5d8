"""The plan of a run: its layouts, each trained for some steps in a subprocess."""

from __future__ import annotations

import os
import time

from tfpar import config
from tfpar.cluster import tf_config
from tfpar.layout import Layout
from tfpar.planning.plan import Devices, Measured, Plan
from tfpar.planning.progress import progress
from tfpar.planning.search import Failed, Search
from tfpar.runs.planning import plan_job, stored_plans
from tfpar.runs.planning.layout_process import LayoutProcesses
from tfpar.runs.planning.plan_devices import PlanDevices
from tfpar.runs.planning.plan_files import with_strategy


def make_plan(run: config.Run, devices: PlanDevices, budget_seconds: float) -> Plan | None:
    """Measure and rank layouts of a run, and store the plan for later runs.

    In a job, every worker calls it, and they measure layouts of several workers together.

    Args:
        run: The run.
        devices: The devices of each worker.
        budget_seconds: Time budget in seconds.

    Returns:
        The plan on the chief, None on the other workers.

    Raises:
        ValueError: If the configuration, the data and the model do not fit together, or one device cannot train the
            model.
        ConnectionError: If another worker is lost.
    """
    job = tf_config.from_environment(os.environ)
    form_seconds = getattr(run.strategy, "form_seconds", config.MultiWorker().form_seconds)
    if job is not None and job.rank > 0:
        plan_job.follow(job, form_seconds)
        return None
    num_workers = 1 if job is None else job.num_workers
    others = None if job is None or num_workers == 1 else plan_job.OtherWorkers(job, form_seconds)
    try:
        with LayoutProcesses() as processes:
            plan = _Planner(run, devices, num_workers, others, processes).plan(budget_seconds)
    finally:
        if others is not None:
            others.end()
    stored_plans.store(stored_plans.plan_path(run, devices, num_workers), plan.to_json())
    return plan


class _Planner:
    def __init__(
        self,
        run: config.Run,
        devices: PlanDevices,
        num_workers: int,
        others: plan_job.OtherWorkers | None,
        processes: LayoutProcesses,
    ) -> None:
        self._run, self._devices, self._num_workers = run, devices, num_workers
        self._others, self._processes = others, processes

    def plan(self, budget_seconds: float) -> Plan:
        search = Search(self._measure, budget_seconds, time.perf_counter())
        with progress("planning: measuring one device ..."):
            facts, memory_bytes, outcome = self._processes.measure_one_device(self._run, self._devices.names)
        devices = Devices(self._devices.kind, len(self._devices.names), self._num_workers, memory_bytes)
        return search.plan(facts, devices, outcome, self._devices.settings_of)

    def _measure(self, layout: Layout) -> Measured | Failed:
        with progress(f"planning: measuring {layout} ..."):
            if layout.num_devices == 1 and self._others is not None:  # the chief measures it alone
                return self._processes.measure_one_device(self._run, self._devices.names)[-1]
            text = config.dump(with_strategy(self._run, self._devices.settings_of(layout)))
            if self._others is None:
                # A process has a fixed number of logical CPUs.
                needs = layout.num_devices if self._devices.kind == "CPU" else self._devices.kind
                return self._processes.measure(text, needs)
            with self._others.measuring(text):
                return self._processes.measure(text)

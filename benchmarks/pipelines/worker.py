"""The process of one turn of a pipeline experiment: `python -m benchmarks.pipelines.worker '{…}'` prints figures."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence

from benchmarks import peers, process
from benchmarks.harness import Output
from benchmarks.pipelines.setting import Setting


def measure(setting: Setting) -> Output:
    """Return the figures of one setting, measured in fresh processes.

    Args:
        setting: What to measure.

    Raises:
        WorkerError: If a process fails.
    """
    if setting.trainer not in ("torch", "torch_sharded"):
        return process.ask_workers("benchmarks.pipelines.worker", setting, setting.num_workers)[0]
    peers.install("torch")
    ranks = process.ask_workers("benchmarks.pipelines.torch_peer", setting, setting.num_peer_processes)
    return {
        "step_seconds": max(statistics.median(rank["lap_seconds"]) for rank in ranks),
        "processor_seconds": sum(statistics.median(rank["lap_processor_seconds"]) for rank in ranks),
        "num_parameters": sum(rank["num_parameters"] for rank in ranks),
    }


def run_here(setting: Setting, rank: int = 0, addresses: Sequence[str] = ()) -> Output:
    """Set up this process and measure the quantity of the setting.

    Args:
        setting: What to measure; the process must not have started TensorFlow yet.
        rank: Which worker this is.
        addresses: The addresses of all workers; empty for one.

    Raises:
        ValueError: If the machine has too few cores.
        SystemExit: In a worker that has lent its devices, at the end.
    """
    if addresses:
        job = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(job)
    _start_tensorflow(setting, rank)
    from benchmarks.pipelines.measurements import MEASUREMENTS

    return MEASUREMENTS[setting.quantity](setting)


def _start_tensorflow(setting: Setting, rank: int) -> None:
    """Give each device, or each of several workers, one core and one thread; the first step gets all, as in use."""
    pinned = setting.quantity != "first_step"
    available = sorted(os.sched_getaffinity(0))
    needed = setting.num_workers if setting.num_workers > 1 else setting.num_devices
    if pinned and needed > len(available):
        raise ValueError(f"This setting needs {needed} cores, and the process may use {len(available)}.")
    if pinned:
        os.sched_setaffinity(0, available[rank : rank + 1] if setting.num_workers > 1 else available[:needed])
    import tensorflow as tf

    import tfpar

    tf.config.set_visible_devices([], "GPU")
    if pinned:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(setting.num_devices)
    if setting.num_devices > 1:
        tfpar.use_logical_cpus(setting.num_devices)


if __name__ == "__main__":
    received = process.request()
    try:
        process.reply(run_here(Setting(**received["setting"]), received["rank"], received["addresses"]))
    except SystemExit:  # its devices were another worker's
        process.reply({})
    os._exit(0)  # as benchmarks.worker

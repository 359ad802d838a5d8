"""One worker of `benchmarks.all_reduce`: one core, one thread, one algorithm, all sizes in turn."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import peers, process
from benchmarks.all_reduce import NUM_WORKERS, repetitions

_GROUP_KEY = 2_000_000
# A worker has its own result while its last message may still be on the way to the other, which would see the socket
# of an ended process.
_LAST_MESSAGE_SECONDS = 1.0


def run_here(algorithm: str, sizes: Sequence[int], rank: int, addresses: list[str]) -> dict[str, Any]:
    """Return `found`: for each size the median seconds and processor seconds of one reduction."""
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
    reduction_of = _gloo(rank, addresses) if algorithm == "gloo" else _tensorflow(algorithm, rank, addresses)
    return {"found": [_time(reduction_of(size), repetitions(size)) for size in sizes]}


def _time(reduce: Callable[[], Any], num_repetitions: int) -> dict[str, float]:
    for _ in range(4):
        reduce()
    seconds = []
    processor_began = time.process_time()
    for _ in range(num_repetitions):
        began = time.perf_counter()
        reduce()
        seconds.append(time.perf_counter() - began)
    processor_seconds = (time.process_time() - processor_began) / num_repetitions
    return {"seconds": statistics.median(seconds), "processor_seconds": processor_seconds}


def _gloo(rank: int, addresses: list[str]) -> Callable[[int], Callable[[], Any]]:
    torch = peers.load("torch")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=NUM_WORKERS)

    def reduction_of(size: int) -> Callable[[], Any]:
        tensor = torch.zeros(size // 4)
        return lambda: torch.distributed.all_reduce(tensor)

    return reduction_of


def _tensorflow(algorithm: str, rank: int, addresses: list[str]) -> Callable[[int], Callable[[], Any]]:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    reduce = _algorithms(tf, strategy)[algorithm]

    def reduction_of(size: int) -> Callable[[], Any]:
        tensor = tf.Variable(tf.random.stateless_normal([size // 4], seed=[rank, 0]))
        return tf.function(lambda: reduce(tensor.read_value()), autograph=False)  # type: ignore[no-any-return]

    return reduction_of


def _algorithms(tf: Any, strategy: Any) -> dict[str, Callable[[Any], Any]]:
    from tfpar.engines.workers.collectives import Group

    group = Group(strategy.extended.worker_devices, NUM_WORKERS)
    instance_keys = itertools.count(1)

    def meeting() -> dict[str, Any]:
        return {
            "group_size": NUM_WORKERS,
            "group_key": _GROUP_KEY,
            "instance_key": next(instance_keys),
            "ordering_token": [],
            "communication_hint": "ring",
        }

    def ring(tensor: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(input=tensor, merge_op="Add", final_op="Id", **meeting())

    def in_pieces(tensor: Any, piece_bytes: int) -> Any:
        num_elements = tensor.shape[0]
        count = -(-num_elements * 4 // piece_bytes)
        ends = [num_elements * number // count for number in range(count + 1)]
        sizes = [end - start for start, end in itertools.pairwise(ends)]
        return tf.concat([ring(piece) for piece in tf.split(tensor, sizes)], 0)

    def gather(tensor: Any) -> Any:
        return tf.add_n(tf.split(tf.raw_ops.CollectiveGatherV2(input=tensor, **meeting()), NUM_WORKERS))

    return {
        "tfpar": group.all_reduce,
        "tfpar bfloat16": lambda tensor: tf.cast(group.all_reduce(tf.cast(tensor, tf.bfloat16)), tf.float32),
        "ring, one piece": ring,
        "ring, pieces of 1 MB": lambda tensor: in_pieces(tensor, 1 << 20),
        "ring, pieces of 4 MB": lambda tensor: in_pieces(tensor, 4 << 20),
        "gather": gather,
    }


if __name__ == "__main__":
    received = process.request()
    process.reply(run_here(**received["setting"], rank=received["rank"], addresses=received["addresses"]))
    time.sleep(_LAST_MESSAGE_SECONDS)
    os._exit(0)  # as benchmarks.worker: PyTorch sometimes aborts on its way out

"""Messages between workers: sent in pieces, whatever their size. The workers are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfpar.strategies.multi_worker import consensus
from tfpar.strategies.multi_worker.consensus import Consensus

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


class Hosts:
    """An all-reduce between threads, which notes the bytes of each message."""

    def __init__(self, num_workers: int) -> None:
        self.sizes: list[int] = []
        self._barrier = threading.Barrier(num_workers, timeout=20)
        self._waiting: list[Any] = []

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        self._waiting.append(tensor)
        self._barrier.wait()
        total = tf.add_n(self._waiting)
        if self._barrier.wait() == 0:
            self.sizes.append(tensor.shape.num_elements() * tensor.dtype.size)
            self._waiting.clear()
        self._barrier.wait()
        return total


def on_all(num_workers: int, run: Callable[[Consensus, int], bytes]) -> tuple[list[bytes], list[int]]:
    hosts, results = Hosts(num_workers), [b""] * num_workers

    def work(rank: int) -> None:
        results[rank] = run(Consensus(hosts, rank, ["host"] * num_workers), rank)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, hosts.sizes


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 35])
def test_a_message_is_sent_in_pieces_and_arrives_whole(sender: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "PIECE_BYTES", 16)
    message = bytes(range(100, 100 + size))
    results, sizes = on_all(2, lambda one, rank: one.broadcast_from(sender, message if rank == sender else None))
    assert results == [message, message]
    assert sizes[0] == 8, "the length"
    assert len(sizes) == 1 + -(-size // 16)
    assert all(piece <= 16 for piece in sizes)

"""Messages and votes between workers. The workers are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfpar import job
from tfpar.job import Job


class Hosts:
    """An all-reduce between threads, which notes the bytes of each message."""

    def __init__(self, num_workers: int) -> None:
        self.sizes: list[int] = []
        self._barrier = threading.Barrier(num_workers, timeout=20)
        self._waiting: list[Any] = []

    def all_reduce(self, values: np.ndarray) -> np.ndarray:
        self._waiting.append(values)
        self._barrier.wait()
        total = np.sum(self._waiting, 0, dtype=values.dtype)
        if self._barrier.wait() == 0:
            self.sizes.append(values.nbytes)
            self._waiting.clear()
        self._barrier.wait()
        return total


def on_all(num_workers: int, run: Callable[[Job], bytes]) -> tuple[list[bytes], list[int]]:
    hosts, results = Hosts(num_workers), [b""] * num_workers

    def work(rank: int) -> None:
        results[rank] = run(Job(["host"] * num_workers, rank, hosts.all_reduce))

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, hosts.sizes


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 35])
def test_a_message_is_sent_in_pieces_and_arrives_whole(sender: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "PIECE_BYTES", 16)
    message = bytes(range(100, 100 + size))
    results, sizes = on_all(2, lambda worker: worker.broadcast(message if worker.rank == sender else None, sender))
    assert results == [message, message]
    assert sizes[0] == 8, "the length"
    assert len(sizes) == 1 + -(-size // 16)
    assert all(piece <= 16 for piece in sizes)

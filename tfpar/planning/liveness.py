"""The peak memory of a graph of operations, in the order of TensorFlow's executor. Pure Python.

    operation      a      b      c      d            a, b: forward; c, d: backward
    tensor of a    |-------------|                   a tensor lives until its last reader has run
    tensor of b           |-------------|
    live           1      2      2      1            peak 2

As `ExecutorState::ScheduleReady` and `Process` in `tensorflow/core/common_runtime/executor.cc` (2.21) do on one
thread: of the operations that an operation makes ready, the cheap ones run next, in their order; of the expensive ones,
the last runs next if no other is cheap, and the others wait in the queue of the thread, which takes the newest first.
On a GPU all operations are cheap for the host, which only launches them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """An operation.

    Args:
        inputs: The tensors that it reads, each as the index of an earlier operation and the number of its output.
        after: Indices of other operations that run before it.
        output_bytes: The bytes that each output allocates; 0 for one that is a view, or that another owner holds.
        views: For each output the position among the inputs whose memory it shares; -1 for memory of its own.
        reuses: Whether an output can take the memory of an input of the same size that nothing else reads.
        is_expensive: Whether the executor may leave it to another thread.
    """

    inputs: tuple[tuple[int, int], ...] = ()
    after: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    reuses: bool = False
    is_expensive: bool = False


def executor_order(nodes: Sequence[Node]) -> list[int]:
    """Return the indices of operations in the order of an executor with one thread.

    Args:
        nodes: The operations; each comes after those before it in the graph.

    Example:
        >>> executor_order([Node(), Node(((0, 0),), is_expensive=True), Node(((0, 0),), is_expensive=True)])
        [0, 2, 1]
    """
    before = [len({one for one, _ in node.inputs} | set(node.after)) for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for one in {one for one, _ in node.inputs} | set(node.after):
            readers[one].append(index)
    queue: list[int] = []
    inline: collections.deque[int] = collections.deque()

    def schedule(ready: Sequence[int]) -> None:
        last = None
        for index in ready:
            if not nodes[index].is_expensive:
                inline.append(index)
                continue
            if last is not None:
                queue.append(last)
            last = index
        if last is not None:
            (queue if inline else inline).append(last)

    schedule([index for index, count in enumerate(before) if not count])
    order: list[int] = []
    while inline or queue:
        index = inline.popleft() if inline else queue.pop()
        order.append(index)
        ready = []
        for reader in readers[index]:
            before[reader] -= 1
            if not before[reader]:
                ready.append(reader)
        schedule(ready)
    return order


def live_bytes(nodes: Sequence[Node], order: Sequence[int], held: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Return the bytes that are allocated while each operation runs.

    Args:
        nodes: The operations.
        order: The order in which they run.
        held: Tensors that live until the end.

    Example:
        >>> chain = [Node(output_bytes=(8,), views=(-1,)), Node(((0, 0),), (), (4,), (-1,)), Node(((1, 0),))]
        >>> live_bytes(chain, [0, 1, 2])
        [8, 12, 4]
    """
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        for number, view in enumerate(node.views):
            own = (index, number)
            owner[own] = own if view < 0 else owner[node.inputs[view]]
    reads = collections.Counter(owner[one] for node in nodes for one in set(node.inputs))
    reads.update(owner[one] for one in held)
    sizes = {(index, number): size for index, node in enumerate(nodes) for number, size in enumerate(node.output_bytes)}
    live, found = 0, []
    for index in order:
        node = nodes[index]
        read = {owner[one] for one in node.inputs}
        for one in set(node.inputs):
            reads[owner[one]] -= 1
        allocated = sum(size for size, view in zip(node.output_bytes, node.views, strict=True) if view < 0)
        free = [one for one in read if not reads[one] and sizes[one]]
        reused = next((one for one in free if node.reuses and node.output_bytes[:1] == (sizes[one],)), None)
        if reused is not None:
            live -= sizes[reused]
            free.remove(reused)
        live += allocated
        found.append(live)
        live -= sum(sizes[one] for one in free)
        unread = [(index, number) for number, view in enumerate(node.views) if view < 0]
        live -= sum(sizes[one] for one in unread if not reads[one])
    return found

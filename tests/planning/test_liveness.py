"""The order of an executor with one thread, and the tensors that live in it."""

from __future__ import annotations

from tfpar.planning.liveness import Node, executor_order, live_bytes


def test_the_last_expensive_operation_runs_next_and_the_others_wait_newest_first() -> None:
    nodes = [Node(), *(Node(((0, 0),), is_expensive=True) for _ in range(3))]
    assert executor_order(nodes) == [0, 3, 2, 1]


def test_cheap_operations_run_before_expensive_ones_in_their_order() -> None:
    nodes = [Node(), Node(((0, 0),), is_expensive=True), Node(((0, 0),)), Node(((0, 0),))]
    assert executor_order(nodes) == [0, 2, 3, 1]


def test_an_operation_waits_for_those_it_must_come_after() -> None:
    nodes = [Node(is_expensive=True), Node(after=(0,)), Node()]
    assert executor_order(nodes) == [2, 0, 1]


def test_a_tensor_lives_until_its_last_reader_has_run() -> None:
    saved = Node(output_bytes=(10,), views=(-1,))
    nodes = [saved, Node(((0, 0),), (), (1,), (-1,)), Node(((1, 0),), (), (1,), (-1,)), Node(((0, 0), (2, 0)))]
    assert live_bytes(nodes, range(4)) == [10, 11, 12, 11]


def test_a_view_keeps_its_memory() -> None:
    nodes = [Node(output_bytes=(10,), views=(-1,)), Node(((0, 0),), (), (0,), (0,)), Node(), Node(((1, 0),))]
    assert live_bytes(nodes, range(4)) == [10, 10, 10, 10]


def test_an_operation_writes_into_an_input_that_nothing_else_reads() -> None:
    nodes = [Node(output_bytes=(10,), views=(-1,)), Node(((0, 0),), (), (10,), (-1,), reuses=True), Node(((1, 0),))]
    assert live_bytes(nodes, range(3)) == [10, 10, 10]


def test_a_held_tensor_lives_until_the_end() -> None:
    nodes = [Node(output_bytes=(10,), views=(-1,)), Node(((0, 0),)), Node()]
    assert live_bytes(nodes, range(3), held=[(0, 0)]) == [10, 10, 10]

"""One traced graph cut into functions that run at different times: forward, backward, weight gradient.

    graph     x ─► h = x w ─► y            f: everything that y needs           saves x, h
              dx ◄── dh ◄──── dy           b: what else dx needs                saves dh
              dw ◄── x, dh                 w: what else dw needs

TensorFlow differentiates the graph as a whole; a piece is the set of operations that its results need and that no piece
before it has run, and what it takes from those is saved for it, nothing else.
"""

from __future__ import annotations

import dataclasses
import graphlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.keras_pipeline import noinline_function

_SUMS_BEHIND = 2  # a product and a bias: two threads may work beside each other


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A part of a traced graph as a compiled function.

    Args:
        takes: Tensors of the traced graph, in the order of the function's arguments.
        gives: Tensors of the traced graph, in the order of its results.
        again: Tensors of the traced graph that a piece before has made and let go, and that it makes again.
        function: From the ones to the others.
    """

    takes: tuple[tf.Tensor, ...]
    gives: tuple[tf.Tensor, ...]
    again: tuple[tf.Tensor, ...]
    function: Any

    def __call__(self, known: dict[Any, tf.Tensor]) -> None:
        """Take the values of what it takes from `known`, by reference, and add what it gives.

        Args:
            known: Values by `tensor.ref()` of the traced graph.
        """
        results = self.function(*(known[tensor.ref()] for tensor in self.takes)) if self.gives else []
        known.update(zip((tensor.ref() for tensor in self.gives), results, strict=True))


def extract_subgraphs(
    graph: Any,
    inputs: Sequence[tf.Tensor],
    results: Sequence[Sequence[tf.Tensor]],
    device: str,
    *,
    sums: Sequence[tf.Tensor] = (),
    again: bool = False,
    jit_compile: bool = False,
) -> list[Subgraph]:
    """Cut a traced function into pieces that run one after the other.

    Args:
        graph: The graph of a concrete function.
        inputs: Its tensors that are known to every piece.
        results: For each piece the tensors that it must give.
        device: Where the pieces run.
        sums: Tensors of the graph that a piece shall make as soon as it can.
        again: Whether the others run what they need of the first again, instead of taking what was saved.
        jit_compile: Compile the pieces with XLA.

    Returns:
        One piece each; a piece takes inputs of the graph and what pieces before it give.
    """
    known = {tensor.op for tensor in (*inputs, *graph.inputs)}
    stateful = [op for op in graph.control_outputs if op not in known]
    pieces_ops: list[set[tf.Operation]] = []
    for number, wanted in enumerate(results):
        ops = _needed(wanted, [] if number else stateful, stop=known)
        pieces_ops.append(ops)
        # What draws at random by TensorFlow's own state would draw something else a second time.
        known = known | ({op for op in ops if op.op_def.is_stateful} if again and number == 0 else ops)
    pieces, whole = [], graph.as_graph_def()
    for number, ops in enumerate(pieces_ops):
        takes = _taken(ops)
        later = _wanted(pieces_ops[number + 1 :], results[number + 1 :])
        if again and number == 0:
            later = [tensor for tensor in later if tensor.op.op_def.is_stateful]
        gives = [tensor for tensor in _unique([*results[number], *later]) if tensor.op in ops]
        repeated = ops & pieces_ops[0] if number else set()
        made_again = [tensor for tensor in (*_taken(ops - repeated), *gives) if tensor.op in repeated]
        pieces.append(
            _piece(graph, whole, ops, takes, gives, made_again, _turns(graph, ops, sums), device, jit_compile)
        )
    return pieces


def _turns(graph: Any, ops: set[tf.Operation], sums: Sequence[tf.Tensor]) -> dict[str, str]:
    """Return which operation waits for which sum, by their names.

    dz3 ─► dw3 ─► sum
     ▼
    dz2 ─► dw2 ─► sum          TensorFlow goes down to the end first, and keeps every dz for its dw
     ▼
    dz1 waits for the sum of dw3
    """
    ends = {total.op for total in sums if total.op in ops}
    if not ends:
        return {}
    place: dict[tf.Operation, float] = {op: number for number, op in enumerate(graph.get_operations()) if op in ops}
    for op in ends:  # behind what it adds, not at the end of the graph, where it was made
        place[op] = 0.5 + max((place[tensor.op] for tensor in op.inputs if tensor.op in ops), default=0.0)
    ended: list[str] = []
    turns = {}
    for op in _in_order(ops, place):
        if len(ended) > _SUMS_BEHIND and op.type != "Const":
            turns[op.name] = ended[-1 - _SUMS_BEHIND]
        if op in ends:
            ended.append(op.name)
    return turns


def _in_order(ops: set[tf.Operation], place: Mapping[tf.Operation, float]) -> Iterator[tf.Operation]:
    """Go through operations by their places, each after what it needs: a loop takes what its gradient made later."""
    needs = {op: [one for one in (*(t.op for t in op.inputs), *op.control_inputs) if one in ops] for op in ops}
    sorter = graphlib.TopologicalSorter(needs)
    sorter.prepare()
    ready: list[tuple[float, str]] = []
    by_name = {op.name: op for op in ops}
    while sorter.is_active():
        for op in sorter.get_ready():
            heapq.heappush(ready, (place[op], op.name))
        op = by_name[heapq.heappop(ready)[1]]
        yield op
        sorter.done(op)


def _wanted(pieces_ops: Sequence[set[tf.Operation]], results: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Return what some pieces take and give: what is among them and known before shall be saved for them."""
    return [tensor for ops in pieces_ops for tensor in _taken(ops)] + [t for wanted in results for t in wanted]


def _needed(tensors: Sequence[tf.Tensor], more: Iterable[tf.Operation], stop: set[tf.Operation]) -> set[tf.Operation]:
    """Return the operations behind some tensors, up to those that are known already."""
    found: set[tf.Operation] = set()
    waiting = [*(tensor.op for tensor in tensors), *more]
    while waiting:
        op = waiting.pop()
        if op in found or op in stop:
            continue
        found.add(op)
        waiting += [tensor.op for tensor in op.inputs]
        waiting += op.control_inputs
    return found


def _taken(ops: set[tf.Operation]) -> list[tf.Tensor]:
    """Return what operations take from others; constants are not taken but made again."""
    outer = [tensor for op in ops for tensor in op.inputs if tensor.op not in ops and tensor.op.type != "Const"]
    return _unique(sorted(outer, key=lambda tensor: tensor.name))


def _unique(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list({tensor.ref(): tensor for tensor in tensors}.values())


def _piece(
    graph: Any, whole: Any, ops: set[tf.Operation], takes: Sequence[tf.Tensor], gives: Sequence[tf.Tensor],
    made_again: Sequence[tf.Tensor], turns: Mapping[str, str], device: str, jit: bool,
) -> Subgraph:  # fmt: skip
    constants = {tensor.op for op in ops for tensor in op.inputs if tensor.op.type == "Const"}
    names = {op.name for op in ops | constants}
    part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    for node in whole.node:
        if node.name in names:
            kept = part.node.add()
            kept.CopyFrom(node)
            kept.input[:] = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            if node.name in turns:
                kept.input.append(f"^{turns[node.name]}")
            kept.attr.pop("_class", None)  # it may name operations of another piece
            kept.device = ""
    captured = {inner.ref(): outer for outer, inner in graph.captures}
    arguments = [tensor for tensor in takes if tensor.ref() not in captured]

    def body(*values: tf.Tensor) -> list[tf.Tensor]:
        known = {tensor.name: value for tensor, value in zip(arguments, values, strict=True)}
        here = tf.compat.v1.get_default_graph()
        known |= {tensor.name: here.capture(captured[tensor.ref()]) for tensor in takes if tensor.ref() in captured}
        with tf.device(device):
            imported = tf.graph_util.import_graph_def(part, known, [tensor.name for tensor in gives], name="")
        return list(imported)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    return Subgraph(tuple(arguments), tuple(gives), tuple(made_again), noinline_function(body, *specs, jit_compile=jit))

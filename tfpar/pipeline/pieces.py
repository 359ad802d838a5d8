"""One traced graph cut into functions that run at different times: forward, backward, weight gradient.

    graph     x ─► h = x w ─► y            f: everything that y needs           saves x, h
              dx ◄── dh ◄──── dy           b: what else dx needs                saves dh
              dw ◄── x, dh                 w: what else dw needs

TensorFlow differentiates the graph as a whole; a piece is the set of operations that its results need and that no piece
before it has run, and what it takes from those is saved for it, nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat_pipeline import called_apart

_LOOKS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")


@dataclasses.dataclass(frozen=True)
class Piece:
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


class Kept(NamedTuple):
    """What one micro-batch keeps on a stage, in bytes.

    Args:
        activation: From its forward pass to the end of its backward pass.
        backward: What the backward pass, or its part for the inputs, makes again and has besides while it runs.
        weight_gradient: The same of its part for the weights.
        waiting: From the end of its part for the inputs to the end of that for the weights.
    """

    activation: int
    backward: int
    weight_gradient: int
    waiting: int


def cut(
    graph: Any,
    inputs: Sequence[tf.Tensor],
    results: Sequence[Sequence[tf.Tensor]],
    device: str,
    *,
    again: bool = False,
    jit_compile: bool = False,
) -> list[Piece]:
    """Cut a traced function into pieces that run one after the other.

    Args:
        graph: The graph of a concrete function.
        inputs: Its tensors that are known to every piece.
        results: For each piece the tensors that it must give.
        device: Where the pieces run.
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
        used = [_buffer(tensor) for tensor in (*_taken(ops - repeated), *gives) if tensor.op in repeated]
        made_again = _unique([tensor for tensor in used if tensor.op in repeated])
        pieces.append(_piece(graph, whole, ops, takes, gives, made_again, device, jit_compile))
    return pieces


def kept_between(
    before: Sequence[tf.Tensor], later: Sequence[Piece], upstream: Sequence[tf.Tensor], num_examples: int
) -> Kept:
    """Return what the pieces of a backward pass keep from a forward pass and from each other.

    Args:
        before: What the forward pass takes and gives.
        later: The backward pass: one piece, or that for the inputs and that for the weights.
        upstream: The gradients that the backward pass begins with.
        num_examples: Of the micro-batch.
    """
    first, *others = later
    taken = _unique([tensor for piece in later for tensor in piece.takes])
    handed_on = _unique([tensor for piece in others for tensor in piece.takes])
    return Kept(
        _bytes(_among(before, taken), num_examples),
        _bytes(first.again, num_examples),
        sum(_bytes(piece.again, num_examples) for piece in others),
        _bytes(_among([*first.gives, *upstream], handed_on), num_examples),
    )


def _among(tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    references = {tensor.ref() for tensor in tensors}
    return [tensor for tensor in others if tensor.ref() in references]


def _bytes(tensors: Sequence[tf.Tensor], num_examples: int) -> int:
    return sum(_bytes_of(tensor, num_examples) for tensor in _unique([_buffer(tensor) for tensor in tensors]))


def _buffer(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor whose memory a tensor is another look at."""
    while tensor.op.type in _LOOKS:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes_of(tensor: tf.Tensor, num_examples: int) -> int:
    sizes = (tensor.shape or ()) if tensor.shape.rank is not None else ()
    known = [num_examples if axis == 0 and size is None else size or 1 for axis, size in enumerate(sizes)]
    return math.prod(known) * int(max(tensor.dtype.size, 1))


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
    made_again: Sequence[tf.Tensor], device: str, jit: bool,
) -> Piece:  # fmt: skip
    constants = {tensor.op for op in ops for tensor in op.inputs if tensor.op.type == "Const"}
    names = {op.name for op in ops | constants}
    part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    for node in whole.node:
        if node.name in names:
            kept = part.node.add()
            kept.CopyFrom(node)
            kept.input[:] = [name for name in node.input if not name.startswith("^") or name[1:] in names]
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
    return Piece(tuple(arguments), tuple(gives), tuple(made_again), called_apart(body, *specs, jit_compile=jit))

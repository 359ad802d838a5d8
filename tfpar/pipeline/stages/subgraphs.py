"""The subgraphs of a traced function that run at different times: forward pass, backward pass, weight gradient.

    graph     x ─► h = x w ─► y            f: all operations that y needs     saves x, h
              dx ◄── dh ◄──── dy           b: those that dx needs besides     saves dh
              dw ◄── x, dh                 w: those that dw needs besides

TensorFlow differentiates the graph as a whole. A subgraph consists of the operations that its results need and that no
earlier subgraph runs. Its inputs from earlier subgraphs are the saved tensors; nothing else is saved.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs.tf_function import noinline_function
from tfpar.pipeline.stages.shards import on_devices, requested_device

_SIZES = ("Rank", "Shape", "ShapeN", "Size")
_PENDING_SUMS = 2  # of a kernel and a bias: two threads may compute at the same time


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A part of a traced graph.

    Args:
        inputs: Tensors of the traced graph, in the order of the function's arguments.
        outputs: Tensors of the traced graph, in the order of its results.
        recomputed: Tensors of the traced graph that an earlier subgraph computed and did not save.
        operations: Its operations.
        captured: Tensors outside of the traced graph that the operations read, by the name of the tensor inside.
        devices: The device of each shard of the stage; the first runs all operations that name none.
        jit_compile: Whether XLA compiles it.
    """

    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    recomputed: tuple[tf.Tensor, ...]
    operations: Any
    captured: dict[str, Any]
    devices: tuple[str, ...]
    jit_compile: bool

    def on(self, devices: Sequence[str]) -> Subgraph:
        """Return the same operations for the devices of another replica."""
        operations = on_devices(self.operations, self.devices, devices)
        return dataclasses.replace(self, operations=operations, devices=tuple(devices))

    def __call__(self, known: dict[Any, tf.Tensor]) -> None:
        """Compute the outputs and add them to `known`.

        Args:
            known: Values by `tensor.ref()` of the traced graph, among them those of the inputs.
        """
        if not self.outputs:
            return
        values = [known[tensor.ref()] for tensor in self.inputs]
        calls = tf.executing_eagerly() or self.jit_compile
        results = self.function(*values) if calls else self._import(*values)
        known.update(zip((tensor.ref() for tensor in self.outputs), results, strict=True))

    @functools.cached_property
    def function(self) -> Any:
        """A concrete function of the inputs to the outputs."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.inputs]
        return noinline_function(self._import, *specs, jit_compile=self.jit_compile)

    def shapes(self, specs: Sequence[tf.TensorSpec]) -> dict[Any, tf.TensorShape]:
        """Return the shape of each output, by its `ref()`, that TensorFlow infers for inputs with some specs."""
        traced = tf.function(self._import, autograph=False).get_concrete_function(*specs)
        pairs = zip(self.outputs, traced.structured_outputs, strict=True)
        return {tensor.ref(): result.shape for tensor, result in pairs}

    def _import(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """Add the operations to the graph that is being traced; return the outputs."""
        known = {tensor.name: value for tensor, value in zip(self.inputs, values, strict=True)}
        here = tf.compat.v1.get_default_graph()
        known |= {name: here.capture(outer) for name, outer in self.captured.items()}
        names = [tensor.name for tensor in self.outputs]
        if len(self.devices) == 1:
            with tf.device(self.devices[0]):
                return list(tf.graph_util.import_graph_def(self.operations, known, names, name=""))
        with tf.device(self.devices[0]), tf.control_dependencies(None):
            return list(tf.graph_util.import_graph_def(self.operations, known, names, name="divided"))


def extract_subgraphs(
    graph: Any,
    inputs: Sequence[tf.Tensor],
    results: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    *,
    late: Sequence[tf.Tensor] = (),
    sums: Sequence[tf.Tensor] = (),
    recompute: bool = False,
    weights: Sequence[tf.Tensor] = (),
    jit_compile: bool = False,
) -> list[Subgraph]:
    """Split a traced function into subgraphs that run one after the other.

    Args:
        graph: The graph of a concrete function.
        inputs: Its tensors that every subgraph may use.
        results: The tensors that each subgraph must compute.
        devices: The device of each shard of the stage; one for a stage that is not divided.
        late: Those of `inputs` that the first subgraph does not have: the gradients of its outputs.
        sums: Tensors of the graph that a subgraph computes as early as possible.
        recompute: Whether later subgraphs recompute tensors of the first, instead of using saved tensors.
        weights: Those of `inputs` from which later subgraphs recompute what depends on them alone, such as casts.
        jit_compile: Compile the subgraphs with XLA.

    Returns:
        One subgraph for each item of `results`. Its inputs are inputs of the graph and outputs of earlier subgraphs.
    """
    known = {tensor.op for tensor in (*inputs, *graph.inputs)}
    stateful = _by_subgraph([op for op in graph.control_outputs if op not in known], late)
    ops_of: list[set[tf.Operation]] = []
    of_weights = _computed_from(weights, graph)
    for number, wanted in enumerate(results):
        ops = _needed(wanted, stateful.get(number, ()), stop=known)
        ops_of.append(ops)
        # A random operation with TensorFlow's own state would draw other numbers when it is recomputed.
        known |= {op for op in ops if op.op_def.is_stateful} if recompute and number == 0 else ops - of_weights
    _take_sizes_early(ops_of[recompute:], results[recompute:], of_weights)
    subgraphs, whole = [], graph.as_graph_def()
    for number, ops in enumerate(ops_of):
        outer = _outer_inputs(ops)
        later = _used(ops_of[number + 1 :], results[number + 1 :])
        if recompute and number == 0:
            later = [tensor for tensor in later if tensor.op.op_def.is_stateful]
        later = [tensor for tensor in later if tensor.op not in of_weights]
        outputs = [tensor for tensor in _unique([*results[number], *later]) if tensor.op in ops]
        repeated = ops & ops_of[0] if number else set()
        recomputed = [tensor for tensor in (*_outer_inputs(ops - repeated), *outputs) if tensor.op in repeated]
        turns = _turns(graph, ops, sums)
        subgraphs.append(_subgraph(graph, whole, ops, outer, outputs, recomputed, turns, devices, jit_compile))
    return subgraphs


def _take_sizes_early(
    ops_of: Sequence[set[tf.Operation]], results: Sequence[Sequence[tf.Tensor]], repeated: set[tf.Operation]
) -> None:
    """Move operations that read sizes alone to the subgraph that has the tensor, which would be saved only for them.

    Those that are repeated are part of each subgraph that needs them, and stay there.

    x ─► mean ─► y            the gradient of a mean needs the shape of x: f saves some integers in place of x
    dx ◄── shape of x ◄── dy
    """
    for number, ops in enumerate(ops_of[:-1]):
        readers = [op for later in ops_of[number + 1 :] for op in later if op not in repeated]
        read = {tensor.ref() for op in readers if not _reads_sizes(op) for tensor in op.inputs}
        read |= {tensor.ref() for wanted in results[number + 1 :] for tensor in wanted}
        here = {tensor.ref() for op in ops for tensor in (*op.inputs, *op.outputs)} - read
        moved = {op for op in readers if _reads_sizes(op) and all(tensor.ref() in here for tensor in op.inputs)}
        ops |= moved
        for later in ops_of[number + 1 :]:
            later -= moved


def _reads_sizes(op: tf.Operation) -> bool:
    return op.type in _SIZES and not op.control_inputs


def _computed_from(weights: Sequence[tf.Tensor], graph: Any) -> set[tf.Operation]:
    """Return the operations, without state, whose inputs are weights, constants or results of such operations."""
    given, found = {tensor.op for tensor in weights}, set[tf.Operation]()
    for op in graph.get_operations() if weights else ():
        sources = [tensor.op for tensor in op.inputs if tensor.op.type != "Const"]
        if sources and not op.op_def.is_stateful and all(one in given or one in found for one in sources):
            found.add(op)
    return found


def _by_subgraph(ops: Iterable[tf.Operation], late: Sequence[tf.Tensor]) -> dict[int, list[tf.Operation]]:
    """Return the operations with side effects of the first subgraph, and of the second, which read late tensors."""
    late_ops, found = {tensor.op for tensor in late}, dict[int, list[tf.Operation]]({0: [], 1: []})
    for op in ops:
        found[int(not late_ops.isdisjoint(_needed((), [op], stop=set())))].append(op)
    return found


def _turns(graph: Any, ops: set[tf.Operation], sums: Sequence[tf.Tensor]) -> dict[str, str]:
    """Return the sum that must precede each operation, both by name.

    dz3 ─► dw3 ─► sum
     ▼
    dz2 ─► dw2 ─► sum          without it TensorFlow computes every dz first, and all are in memory at once
     ▼
    dz1 comes after the sum of dw3
    """
    ends = {total.op for total in sums if total.op in ops}
    if not ends:
        return {}
    place: dict[tf.Operation, float] = {op: number for number, op in enumerate(graph.get_operations()) if op in ops}
    for op in ends:  # after its summands, not at the end of the graph, where it was added
        place[op] = 0.5 + max((place[tensor.op] for tensor in op.inputs if tensor.op in ops), default=0.0)
    ended: list[str] = []
    turns = {}
    for op in _in_order(ops, place):
        if len(ended) > _PENDING_SUMS and op.type != "Const":
            turns[op.name] = ended[-1 - _PENDING_SUMS]
        if op in ends:
            ended.append(op.name)
    return turns


def _in_order(ops: set[tf.Operation], place: Mapping[tf.Operation, float]) -> Iterator[tf.Operation]:
    """Yield operations by their places, but each after its inputs: a loop may have inputs that its gradient added."""
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


def _used(ops_of: Sequence[set[tf.Operation]], results: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Return the inputs and results of subgraphs: those that an earlier subgraph computes must be saved."""
    return [tensor for ops in ops_of for tensor in _outer_inputs(ops)] + [t for wanted in results for t in wanted]


def _needed(tensors: Sequence[tf.Tensor], more: Iterable[tf.Operation], stop: set[tf.Operation]) -> set[tf.Operation]:
    """Return the ancestors of some tensors, up to operations that have run already."""
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


def _outer_inputs(ops: set[tf.Operation]) -> list[tf.Tensor]:
    """Return the inputs of operations from others, without constants: every subgraph has its own copy of these."""
    outer = [tensor for op in ops for tensor in op.inputs if tensor.op not in ops and tensor.op.type != "Const"]
    return _unique(sorted(outer, key=lambda tensor: tensor.name))


def _unique(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list({tensor.ref(): tensor for tensor in tensors}.values())


def _without_device(library: Any, device: str) -> Any:
    """Return functions whose operations run on the device of their call where they named this one."""
    free = type(library)()
    free.CopyFrom(library)
    wanted = tf.DeviceSpec.from_string(device)
    for function in free.function:
        for node in function.node_def:
            if node.device and wanted.make_merged_spec(tf.DeviceSpec.from_string(node.device)) == wanted:
                node.device = ""
    return free


def _subgraph(
    graph: Any,
    whole: Any,
    ops: set[tf.Operation],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    recomputed: Sequence[tf.Tensor],
    turns: Mapping[str, str],
    devices: Sequence[str],
    jit_compile: bool,
) -> Subgraph:
    constants = {tensor.op for op in ops for tensor in op.inputs if tensor.op.type == "Const"}
    names = {op.name for op in ops | constants}
    part = tf.compat.v1.GraphDef(library=_without_device(whole.library, devices[0]), versions=whole.versions)
    for node in whole.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            copy.input[:] = [name for name in node.input if not name.startswith("^") or name[1:] in names]
            if node.name in turns:
                copy.input.append(f"^{turns[node.name]}")
            copy.attr.pop("_class", None)  # it may name operations of another subgraph
            copy.device = requested_device(node.device, devices, jit_compile)
    outside = {inner.ref(): outer for outer, inner in graph.captures}
    arguments = [tensor for tensor in inputs if tensor.ref() not in outside]
    captured = {tensor.name: outside[tensor.ref()] for tensor in inputs if tensor.ref() in outside}
    return Subgraph(tuple(arguments), tuple(outputs), tuple(recomputed), part, captured, tuple(devices), jit_compile)

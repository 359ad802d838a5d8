"""Subgraphs of a traced function that run at different times: forward pass, backward pass, weight gradients.

    graph     x ─► h = x w ─► y            f: all operations that y needs          saves x, h
              dx ◄── dh ◄──── dy           b: all other operations that dx needs   saves dh
              dw ◄── x, dh                 w: all other operations that dw needs

TensorFlow differentiates the whole graph. A subgraph consists of the operations that its results need and that no
earlier subgraph runs. The saved tensors are exactly its inputs from earlier subgraphs.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs.tf_function import noinline_function
from tfpar.pipeline.stages.shards import replace_devices, requested_device

_SIZES = ("Rank", "Shape", "ShapeN", "Size")
_PENDING_SUMS = 2  # those of a kernel and a bias may be computed at the same time


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A part of a traced graph.

    Args:
        inputs: Tensors of the traced graph that are arguments.
        outputs: Tensors of the traced graph that are results.
        recomputed: Tensors of the traced graph that an earlier subgraph computed but did not save.
        operations: The operations, as a `GraphDef`.
        captured: Tensors outside the traced graph that the operations read, by the name of the tensor inside.
        devices: The device of each shard of the stage. The first runs all operations without a device.
        jit_compile: Whether XLA compiles the subgraph.
    """

    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    recomputed: tuple[tf.Tensor, ...]
    operations: Any
    captured: dict[str, Any]
    devices: tuple[str, ...]
    jit_compile: bool

    def on(self, devices: Sequence[str]) -> Subgraph:
        """Return the same subgraph on the devices of another replica."""
        operations = replace_devices(self.operations, self.devices, devices)
        return dataclasses.replace(self, operations=operations, devices=tuple(devices))

    def __call__(self, known: dict[Any, tf.Tensor]) -> None:
        """Compute the outputs and add them to `known`.

        Args:
            known: Values by `tensor.ref()` of the traced graph, including the inputs.
        """
        if not self.outputs:
            return
        values = [known[tensor.ref()] for tensor in self.inputs]
        calls = tf.executing_eagerly() or self.jit_compile
        results = self.function(*values) if calls else self._import(*values)
        known.update(zip((tensor.ref() for tensor in self.outputs), results, strict=True))

    @functools.cached_property
    def function(self) -> Any:
        """The subgraph as a concrete function."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self.inputs]
        return noinline_function(self._import, *specs, jit_compile=self.jit_compile)

    def shapes(self, specs: Sequence[tf.TensorSpec]) -> dict[Any, tf.TensorShape]:
        """Infer the shape of each output, by its `ref()`, from the specs of the inputs."""
        traced = tf.function(self._import, autograph=False).get_concrete_function(*specs)
        pairs = zip(self.outputs, traced.structured_outputs, strict=True)
        return {tensor.ref(): result.shape for tensor, result in pairs}

    def _import(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """Add the operations to the current graph; return the outputs."""
        known = {tensor.name: value for tensor, value in zip(self.inputs, values, strict=True)}
        graph = tf.compat.v1.get_default_graph()
        known |= {name: graph.capture(outer) for name, outer in self.captured.items()}
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
    repeated: Collection[tf.Operation] | None = (),
    weights: Sequence[tf.Tensor] = (),
    jit_compile: bool = False,
) -> list[Subgraph]:
    """Split a traced function into consecutive subgraphs.

    Args:
        graph: The graph of a concrete function.
        inputs: Tensors of the graph that every subgraph may use.
        results: The tensors that each subgraph must compute.
        devices: The device of each shard of the stage.
        late: Those of `inputs` that the first subgraph does not have: the gradients of its outputs.
        sums: Tensors of the graph to compute as early as possible, to release their summands.
        repeated: The operations of the first subgraph that later ones repeat instead of saving their results; None for
            all.
        weights: Those of `inputs` whose derived tensors, such as casts, are recomputed instead of saved.
        jit_compile: Whether XLA compiles the subgraphs.

    Returns:
        One subgraph for each item of `results`. Its inputs are inputs of the graph and outputs of earlier subgraphs.
    """
    known = {tensor.op for tensor in (*inputs, *graph.inputs)}
    stateful = _by_subgraph([op for op in graph.control_outputs if op not in known], late)
    ops_of: list[set[tf.Operation]] = []
    weight_ops = _computed_from(weights, graph)
    for index, tensors in enumerate(results):
        ops = _needed(tensors, stateful.get(index, ()), stop=known)
        ops_of.append(ops)
        known |= ops - (weight_ops if index else weight_ops | _repeatable(ops, repeated))
    again = weight_ops | _repeatable(ops_of[0], repeated)
    saves = int(repeated is None)  # the first subgraph saves nothing
    _read_sizes_early(ops_of[saves:], results[saves:], again)
    subgraphs, whole = [], graph.as_graph_def()
    for index, ops in enumerate(ops_of):
        outer = _outer_inputs(ops)
        # Later subgraphs read these tensors, or return them. Those that this one computes are saved.
        later = [tensor for later_ops in ops_of[index + 1 :] for tensor in _outer_inputs(later_ops)]
        later += itertools.chain(*results[index + 1 :])
        later = [tensor for tensor in later if tensor.op not in (weight_ops if index else again)]
        outputs = [tensor for tensor in _unique([*results[index], *later]) if tensor.op in ops]
        copied = ops & ops_of[0] if index else set()
        recomputed = [tensor for tensor in (*_outer_inputs(ops - copied), *outputs) if tensor.op in copied]
        waits = _waits_for_sums(graph, ops, sums)
        subgraphs.append(_subgraph(graph, whole, ops, outer, outputs, recomputed, waits, devices, jit_compile))
    return subgraphs


def _read_sizes_early(
    ops_of: Sequence[set[tf.Operation]], results: Sequence[Sequence[tf.Tensor]], repeated: set[tf.Operation]
) -> None:
    """Move operations that read only the size of a tensor to the subgraph that has the tensor, to save only the size.

    x ─► mean ─► y            the gradient of a mean needs the shape of x: f saves the shape instead of x
    dx ◄── shape of x ◄── dy

    Repeated operations stay in each subgraph that needs them.
    """
    for index, ops in enumerate(ops_of[:-1]):
        readers = [op for later in ops_of[index + 1 :] for op in later if op not in repeated]
        read = {tensor.ref() for op in readers if not _reads_sizes(op) for tensor in op.inputs}
        read |= {tensor.ref() for later_results in results[index + 1 :] for tensor in later_results}
        here = {tensor.ref() for op in ops for tensor in (*op.inputs, *op.outputs)} - read
        moved = {op for op in readers if _reads_sizes(op) and all(tensor.ref() in here for tensor in op.inputs)}
        ops |= moved
        for later in ops_of[index + 1 :]:
            later -= moved


def _repeatable(ops: set[tf.Operation], repeated: Collection[tf.Operation] | None) -> set[tf.Operation]:
    """Return the operations to repeat. A random operation with a state of TensorFlow would give other numbers."""
    return {op for op in (ops if repeated is None else ops.intersection(repeated)) if not op.op_def.is_stateful}


def _reads_sizes(op: tf.Operation) -> bool:
    return op.type in _SIZES and not op.control_inputs


def _computed_from(weights: Sequence[tf.Tensor], graph: Any) -> set[tf.Operation]:
    """Return the stateless operations that depend only on weights and constants."""
    weight_ops = {tensor.op for tensor in weights}
    known = set(weight_ops)
    for op in graph.get_operations() if weights else ():
        sources = {tensor.op for tensor in op.inputs if tensor.op.type != "Const"}
        if sources and not op.op_def.is_stateful and sources <= known:
            known.add(op)
    return known - weight_ops


def _by_subgraph(ops: Iterable[tf.Operation], late: Sequence[tf.Tensor]) -> dict[int, list[tf.Operation]]:
    """Return the operations with side effects of the first subgraph, and of the second, which read late tensors."""
    late_ops, subgraphs = {tensor.op for tensor in late}, dict[int, list[tf.Operation]]({0: [], 1: []})
    for op in ops:
        subgraphs[int(not late_ops.isdisjoint(_needed((), [op], stop=set())))].append(op)
    return subgraphs


def _waits_for_sums(graph: Any, ops: set[tf.Operation], sums: Sequence[tf.Tensor]) -> dict[str, str]:
    """Return the sum that each operation waits for, both by name.

    dz3 ─► dw3 ─► sum
     ▼
    dz2 ─► dw2 ─► sum          otherwise TensorFlow computes every dz first, and all are in memory at once
     ▼
    dz1 waits for the sum of dw3
    """
    sum_ops = {total.op for total in sums if total.op in ops}
    if not sum_ops:
        return {}
    rank: dict[tf.Operation, float] = {op: index for index, op in enumerate(graph.get_operations()) if op in ops}
    for op in sum_ops:  # right after its summands, not at the end of the graph, where it was added
        rank[op] = 0.5 + max((rank[tensor.op] for tensor in op.inputs if tensor.op in ops), default=0.0)
    earlier_sums: list[str] = []
    waits = {}
    for op in _in_order(ops, rank):
        if len(earlier_sums) > _PENDING_SUMS and op.type != "Const":
            waits[op.name] = earlier_sums[-1 - _PENDING_SUMS]
        if op in sum_ops:
            earlier_sums.append(op.name)
    return waits


def _in_order(ops: set[tf.Operation], rank: Mapping[tf.Operation, float]) -> Iterator[tf.Operation]:
    """Yield operations by rank, but after their inputs: a loop may have inputs that its gradient added."""
    dependencies = {op: ops.intersection([*(tensor.op for tensor in op.inputs), *op.control_inputs]) for op in ops}
    sorter = graphlib.TopologicalSorter(dependencies)
    sorter.prepare()
    ready: list[tuple[float, str]] = []
    by_name = {op.name: op for op in ops}
    while sorter.is_active():
        for op in sorter.get_ready():
            heapq.heappush(ready, (rank[op], op.name))
        op = by_name[heapq.heappop(ready)[1]]
        yield op
        sorter.done(op)


def _needed(tensors: Sequence[tf.Tensor], more: Iterable[tf.Operation], stop: set[tf.Operation]) -> set[tf.Operation]:
    """Return the operations that tensors and `more` depend on, up to and without `stop`."""
    needed: set[tf.Operation] = set()
    waiting = [*(tensor.op for tensor in tensors), *more]
    while waiting:
        op = waiting.pop()
        if op in needed or op in stop:
            continue
        needed.add(op)
        waiting += [tensor.op for tensor in op.inputs]
        waiting += op.control_inputs
    return needed


def _outer_inputs(ops: set[tf.Operation]) -> list[tf.Tensor]:
    """Return the inputs from other operations, except constants, which every subgraph copies."""
    outer = [tensor for op in ops for tensor in op.inputs if tensor.op not in ops and tensor.op.type != "Const"]
    return _unique(sorted(outer, key=lambda tensor: tensor.name))


def _unique(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list({tensor.ref(): tensor for tensor in tensors}.values())


def _without_device(library: Any, device: str) -> Any:
    """Remove a device from the operations of functions, so that they run on the device of the caller."""
    copy = type(library)()
    copy.CopyFrom(library)
    removed = tf.DeviceSpec.from_string(device)
    for function in copy.function:
        for node in function.node_def:
            if node.device and removed.make_merged_spec(tf.DeviceSpec.from_string(node.device)) == removed:
                node.device = ""
    return copy


def _subgraph(
    graph: Any,
    whole: Any,
    ops: set[tf.Operation],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    recomputed: Sequence[tf.Tensor],
    waits: Mapping[str, str],
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
            if node.name in waits:
                copy.input.append(f"^{waits[node.name]}")
            copy.attr.pop("_class", None)  # it may name operations of another subgraph
            copy.device = requested_device(node.device, devices, jit_compile)
    outside = {inner.ref(): outer for outer, inner in graph.captures}
    arguments = [tensor for tensor in inputs if tensor.ref() not in outside]
    captured = {tensor.name: outside[tensor.ref()] for tensor in inputs if tensor.ref() in outside}
    return Subgraph(tuple(arguments), tuple(outputs), tuple(recomputed), part, captured, tuple(devices), jit_compile)

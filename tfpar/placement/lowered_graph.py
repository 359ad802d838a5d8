"""The graph of a compiled function as TensorFlow places it: calls inlined, loops and conditions as single operations.

    call of f(x)      ─►  the operations of f, with the device of the call where they have none
    while (cond, body) ─►  LoopVariable for each tensor, the operations of cond ─► LoopCond, those of body
    if (then, else)    ─►  Switch for each input, the operations of both branches, Merge for each output

As in `tensorflow/core/common_runtime/lower_while_op.cc`, `lower_if_op.cc` and `inline_function_utils.cc` (2.21), which
run before the placer.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat import tf_kernels

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS, _CONDITIONS, _CASES = ("While", "StatelessWhile"), ("If", "StatelessIf"), ("Case", "StatelessCase")
RESOURCE: int = tf.resource.as_datatype_enum
VARIANT: int = tf.variant.as_datatype_enum
BOOL: int = tf.bool.as_datatype_enum


class Output(NamedTuple):
    """An output of an operation: the operation's index, and the number of the output."""

    operation: int
    number: int


@dataclasses.dataclass
class Operation:
    """An operation of the lowered graph.

    Attributes:
        name: Its name, after those of the calls around it.
        kind: Such as "MatMul"; "Argument" for an input of the graph.
        requested: The device that it or a call around it asks for; empty without one.
        signature: The names and types of its inputs and outputs.
        inputs: What it reads.
        colocated: Indices of operations that it must share a device with.
    """

    name: str
    kind: str
    requested: str
    signature: tf_kernels.Signature
    inputs: list[Output]
    colocated: list[int] = dataclasses.field(default_factory=list)


def lower(graph_def: Any) -> list[Operation]:
    """Return the operations of a graph, with those of all functions that it calls.

    Args:
        graph_def: A GraphDef with its library.

    Example:
        >>> graph = tf.function(lambda x: tf.function(tf.abs)(x)).get_concrete_function(tf.zeros([2])).graph
        >>> [operation.kind for operation in lower(graph.as_graph_def())][:2]
        ['Argument', 'Abs']
    """
    lowering = _Lowering({function.signature.name: function for function in graph_def.library.function})
    lowering.add_body(graph_def.node, {}, "", "")
    return lowering.operations


class _Lowering:
    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.operations: list[Operation] = []
        self._functions = functions

    def add_body(self, nodes: Iterable[Any], arguments: Mapping[str, Output], device: str, scope: str) -> _Body:
        """Add the nodes of a graph or function, in an order in which each comes after its inputs."""
        body = _Body(arguments)
        by_name = {node.name: node for node in nodes}
        # Control inputs, too: a node may come before another only by one, and they never form a circle.
        before = {
            name: [one for one in map(_node_name, node.input) if one in by_name] for name, node in by_name.items()
        }
        for name in graphlib.TopologicalSorter(before).static_order():
            self._add(by_name[name], body, device, scope)
        return body

    def _add(self, node: Any, body: _Body, device: str, scope: str) -> None:
        inputs = [body.output(text) for text in node.input if not text.startswith("^")]
        device, name = node.device or device, f"{scope}{node.name}"
        if node.op in _CALLS and not node.attr["_XlaMustCompile"].b:
            outputs = self._call(node.attr["f"].func.name, inputs, device, f"{name}/")
            body.note(node.name, {"output": outputs})
        elif node.op in self._functions:
            definition = self._functions[node.op].signature
            outputs = self._call(node.op, inputs, device, f"{name}/")
            names = [one.name for one in definition.output_arg]
            body.note(node.name, {one: [output] for one, output in zip(names, outputs, strict=True)})
        elif node.op in _LOOPS:
            body.note(node.name, {"output": self._loop(node, inputs, device, name)})
        elif node.op in (*_CONDITIONS, *_CASES):
            body.note(node.name, {"output": self._condition(node, inputs, device, name)})
        else:
            self._leaf(node, inputs, device, name, body)

    def _leaf(self, node: Any, inputs: Sequence[Output], device: str, name: str, body: _Body) -> None:
        if node.op == "Identity" and not device:  # TensorFlow removes it where that saves a copy
            body.note(node.name, {"output": list(inputs)})
            return
        kind = "Argument" if node.op == "Placeholder" else node.op
        signature = tf_kernels.signature(tf_kernels.op_def(node.op), node.attr)
        index = self._new(name, kind, device, signature, inputs)
        labels = [label.decode().removeprefix("loc:@") for label in node.attr["_class"].list.s]
        self.operations[index].colocated += [
            body.output(f"{label}:0").operation for label in labels if label != node.name and body.knows(label)
        ]
        found: dict[str, list[Output]] = {}
        for number, argument in enumerate(signature.outputs):
            found.setdefault(argument, []).append(Output(index, number))
        body.note(node.name, found)

    def _call(self, function: str, inputs: Sequence[Output], device: str, scope: str) -> list[Output]:
        definition = self._functions[function]
        names = [one.name for one in definition.signature.input_arg]
        body = self.add_body(definition.node_def, dict(zip(names, inputs, strict=True)), device, scope)
        return [body.output(definition.ret[one.name]) for one in definition.signature.output_arg]

    def _loop(self, node: Any, inputs: Sequence[Output], device: str, name: str) -> list[Output]:
        variables = [self._loop_variable(one, f"{name}/variable_{number}") for number, one in enumerate(inputs)]
        (holds,) = self._call(node.attr["cond"].func.name, variables, device, f"{name}/cond/")
        condition = self._new(f"{name}/LoopCond", "LoopCond", device, _signature(BOOL, ["input"], ["output"]), [holds])
        results = self._call(node.attr["body"].func.name, variables, device, f"{name}/body/")
        for variable, first, result in zip(variables, inputs, results, strict=True):
            if variable != first:
                self.operations[variable.operation].inputs += [Output(condition, 0), result]
        return variables

    def _loop_variable(self, first: Output, name: str) -> Output:
        """Add a variable of a loop, on the device of its first value, if that has asked for one."""
        source = self.operations[first.operation]
        kind = source.signature.output_types[first.number]
        if kind == RESOURCE:
            return first
        signature = _signature(kind, ["data", "pred", "data"], ["output_true"])
        index = self._new(name, "Switch", source.requested, signature, [first])
        if source.kind == "Argument":  # its device is known before the others are chosen
            self.operations[index].colocated.append(first.operation)
        return Output(index, 0)

    def _condition(self, node: Any, inputs: Sequence[Output], device: str, name: str) -> list[Output]:
        predicate, *given = inputs
        kind = self.operations[predicate.operation].signature.output_types[predicate.number]
        signature = _signature(kind, ["data", "pred"], ["output_true"])
        self._new(f"{name}/predicate", "Switch", device, signature, [predicate] * 2)
        switched = [self._switched(one, predicate, f"{name}/input_{number}") for number, one in enumerate(given)]
        branches = [
            self._call(function.name, switched, device, f"{name}/{label}/") for label, function in _branches(node)
        ]
        return [
            self._merge(values, device, f"{name}/output_{number}")
            for number, values in enumerate(zip(*branches, strict=True))
        ]

    def _switched(self, given: Output, predicate: Output, name: str) -> Output:
        source = self.operations[given.operation]
        kind = source.signature.output_types[given.number]
        if kind == RESOURCE:
            return given
        signature = _signature(kind, ["data", "pred"], ["output_true"])
        index = self._new(name, "Switch", source.requested, signature, [given, predicate])
        self.operations[index].colocated.append(given.operation)
        return Output(index, 0)

    def _merge(self, values: Sequence[Output], device: str, name: str) -> Output:
        first = values[0]
        kind = self.operations[first.operation].signature.output_types[first.number]
        if kind == RESOURCE:
            return first
        signature = _signature(kind, ["inputs"] * len(values), ["output"])
        return Output(self._new(name, "Merge", device, signature, values), 0)

    def _new(self, name: str, kind: str, device: str, signature: tf_kernels.Signature, inputs: Sequence[Output]) -> int:
        self.operations.append(Operation(name, kind, device, signature, list(inputs)))
        return len(self.operations) - 1


class _Body:
    """The outputs of the nodes of one graph or function, by the texts that other nodes write for them."""

    def __init__(self, arguments: Mapping[str, Output]) -> None:
        self._arguments = arguments
        self._outputs: dict[str, dict[str, list[Output]]] = {}

    def note(self, name: str, outputs: dict[str, list[Output]]) -> None:
        self._outputs[name] = outputs

    def knows(self, name: str) -> bool:
        return any(self._outputs.get(name, {}).values())

    def output(self, text: str) -> Output:
        """Return what "x", "x:1", or within a function "x:output:1", means."""
        name, *place = text.split(":")
        if name in self._arguments:
            return self._arguments[name]
        outputs = self._outputs[name]
        if len(place) == 2:
            return outputs[place[0]][int(place[1])]
        return [one for ones in outputs.values() for one in ones][int(place[0]) if place else 0]


def _node_name(text: str) -> str:
    return text.removeprefix("^").partition(":")[0]


def _branches(node: Any) -> list[tuple[str, Any]]:
    if node.op in _CONDITIONS:
        return [(label, node.attr[f"{label}_branch"].func) for label in ("then", "else")]
    return [(f"branch_{number}", one) for number, one in enumerate(node.attr["branches"].list.func)]


def _signature(kind: int, inputs: Sequence[str], outputs: Sequence[str]) -> tf_kernels.Signature:
    return tf_kernels.Signature((("T", (kind,)),), tuple(inputs), tuple(outputs), (kind,) * len(outputs))

"""Where TensorFlow would place the operations of a compiled function if its devices were GPUs, and what that costs.

No GPU is needed: TensorFlow's wheel for Linux registers its GPU kernels on every machine. What Keras traces only where
there are GPUs, such as cuDNN's LSTM, is not in a graph that was traced without them. As TensorFlow 2.21 does before a
step (`tensorflow/core/common_runtime`), a graph is first lowered, and then placed:

    lower_while_op.cc, lower_if_op.cc, inline_function_utils.cc
    call of f(x)          ─►  the operations of f, with the device of the call where they have none
    while (cond, body)    ─►  LoopVariable for each tensor, the operations of cond ─► LoopCond, those of body
    if (then, else)       ─►  Switch for each input, the operations of both branches, Merge for each output

    placer.cc
    resource handles      ─►  all operations on one handle share the device of its variable
    a requested device    ─►  that device, if the operation has a kernel there; else the host
    nothing requested     ─►  the first GPU, if the operation has a kernel there; else the host
    Shape, Size, Rank     ─►  the device of their input, if nothing is requested
    no input, as a Const  ─►  the device of its consumers, if they share one
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar._compat.graphs import tf_kernels

HOST = "CPU:0"
RESOURCE, VARIANT, BOOL = (kind.as_datatype_enum for kind in (tf.resource, tf.variant, tf.bool))
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS, CONDITIONS, CASES = ("While", "StatelessWhile"), ("If", "StatelessIf"), ("Case", "StatelessCase")
METADATA = ("Shape", "ShapeN", "Size", "Rank")
OF_DATA = ("OptionalGetValue", "IteratorGetNext")
# What they return is a part of their input, or all of it.
MOVING = {"ConcatV2", "Identity", "IdentityN", "Merge", "OptionalFromValue", "Reshape"}
MOVING |= {"Slice", "Split", "SplitV", "StridedSlice", "Switch"}
# Operations that create a bundle of tensors in the step, or read one that an earlier step has copied to a device, and
# those that return the bundles of their inputs.
BUNDLES = {"EmptyTensorList", "OptionalFromValue", "ReadVariableOp"}
CARRYING = {"Identity", "Merge", "OptionalGetValue", "Switch"}
CARRYING |= {"TensorListConcatLists", "TensorListPopBack", "TensorListPushBack"}
# Operations whose results lie where their inputs do.
OF_MEMORY = {"Argument", "Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "PreventGradient", "ReadVariableOp"}
OF_MEMORY |= {"Reshape", "Squeeze", "StopGradient", "VarHandleOp", *METADATA, *BUNDLES, *CARRYING}


class Placed(NamedTuple):
    """An operation: its kind, such as "MatMul", its name after those of the calls around it, and its device."""

    kind: str
    name: str
    device: str


class Transfer(NamedTuple):
    """A tensor that is copied between two places: the memory of the host, "CPU:0", and that of each GPU.

    Attributes:
        source: The name of the operation that computes it.
        source_kind: The kind of that operation, such as "Shape".
        dtype: The type of the tensor, such as "int64".
        origin: Where it lies.
        consumer: The name of an operation that reads it.
        consumer_kind: The kind of that operation.
        argument: The input of the consumer.
        target: Where the consumer reads it.
    """

    source: str
    source_kind: str
    dtype: str
    origin: str
    consumer: str
    consumer_kind: str
    argument: str
    target: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """The placement of a step.

    Attributes:
        operations: All operations, with their devices.
        on_host: Operations without a kernel for GPUs between two that have one.
        waits: Sizes, bounds and predicates that a GPU computes and the host waits for; each once.
        detours: Tensors that pass a GPU which no one asked for, on their way to another one.
        entries: How many parts of each tensor of a batch are copied to each GPU, by its number and the device; one is
            the tensor itself.
        entering: The copies of those parts, each once.
        copies: All copies between two places, one for each operation that reads one.
        ordered: Operations that begin after one in another place has ended, although they read nothing of it: the host
            waits for all that the GPU was given before, and so does another GPU.
        kernels: The operations that GPUs compute; others only name their memory, or compute sizes.
    """

    operations: tuple[Placed, ...]
    on_host: tuple[Placed, ...]
    waits: tuple[Transfer, ...]
    detours: tuple[Transfer, ...]
    entries: Mapping[tuple[int, str], int]
    entering: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]
    ordered: tuple[Transfer, ...]
    kernels: tuple[Placed, ...]

    @property
    def host_waits(self) -> list[Transfer]:
        """The operations of the host that wait for a GPU."""
        return [*self.waits, *(one for one in self.ordered if one.target == HOST)]

    @property
    def moves(self) -> list[Transfer]:
        """The copies between two GPUs."""
        return [copy for copy in self.copies if HOST not in (copy.origin, copy.target)]


def read_placement(
    function: Any, devices: Mapping[str, str] | None = None, default: str = "GPU:0", graph_def: Any = None
) -> Reading:
    """Read where the operations of a compiled function run, or would run if its devices were GPUs.

    Args:
        function: A concrete function.
        devices: The GPU in place of each device, such as `{"CPU:1": "GPU:0"}`; all others are the host. None for
            the devices as they are.
        default: The GPU of operations that request no device.
        graph_def: Its graph after an optimization; None for the graph as it was traced.
    """

    def device_of(name: str) -> str:
        short = name.rpartition("device:")[2].upper()
        if devices is not None:
            return devices.get(short, HOST)
        return short if short.startswith("GPU") else HOST

    arguments = {inner.op.name: device_of(outer.device) for outer, inner in function.graph.captures}
    operations = lower(function.graph.as_graph_def() if graph_def is None else graph_def)
    graph = PlacedGraph(operations, choose_devices(operations, device_of, arguments, default))
    placed = [Placed(one.kind, one.name, device) for one, device in zip(operations, graph.devices, strict=True)]
    kernels = [one for index, one in enumerate(placed) if graph.computes(index)]
    # A tensor is copied to a device once: only the first operation that reads it there counts. An operation that has
    # no kernel for GPUs is no wait.
    waits = [copy for copy in graph.copies if copy.target == HOST and not graph.lacks_kernel[copy.consumer]]
    first_readers = {copy.output: copy for copy in reversed(waits)}
    entries, entering = _entries(graph)
    return Reading(
        tuple(placed),
        tuple(placed[index] for index in sorted(_on_host(graph))),
        tuple(graph.transfer(copy) for copy in reversed(first_readers.values())),
        tuple(graph.transfer(copy) for copy in _detours(graph)),
        entries,
        tuple(graph.transfer(copy) for copy in entering),
        tuple(map(graph.transfer, graph.copies)),
        tuple(map(graph.transfer, _ordered(graph))),
        tuple(kernels),
    )


# The lowered graph: calls inlined, loops and conditions as single operations.


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
        after: Indices of operations that must have ended before it begins.
    """

    name: str
    kind: str
    requested: str
    signature: tf_kernels.Signature
    inputs: list[Output]
    colocated: list[int] = dataclasses.field(default_factory=list)
    after: frozenset[int] = frozenset()


def lower(graph_def: Any) -> list[Operation]:
    """Return the operations of a graph with its library, with those of all functions that it calls."""
    lowering = _Lowering({function.signature.name: function for function in graph_def.library.function})
    lowering.add_body(graph_def.node, {}, "", "")
    return lowering.operations


class _Lowering:
    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.operations: list[Operation] = []
        self._functions = functions

    def add_body(
        self,
        nodes: Iterable[Any],
        arguments: Mapping[str, Output],
        device: str,
        scope: str,
        after: frozenset[int] = frozenset(),
    ) -> _Body:
        """Add the nodes of a graph or function, in an order in which each comes after its inputs."""
        body = _Body(arguments, after)
        by_name = {node.name: node for node in nodes}
        # Control inputs, too: a node may come before another only by one, and they never form a circle.
        before = {
            name: [one for text in node.input if (one := text.removeprefix("^").partition(":")[0]) in by_name]
            for name, node in by_name.items()
        }
        for name in graphlib.TopologicalSorter(before).static_order():
            self._add(by_name[name], body, device, scope)
        return body

    def _add(self, node: Any, body: _Body, device: str, scope: str) -> None:
        inputs = [body.output(text) for text in node.input if not text.startswith("^")]
        after = body.after(node.input)
        device, name = node.device or device, f"{scope}{node.name}"
        if node.op in CALLS and not node.attr["_XlaMustCompile"].b:
            results, ended = self._call(node.attr["f"].func.name, inputs, device, f"{name}/", after)
            outputs = {"output": results}
        elif node.op in self._functions:
            results, ended = self._call(node.op, inputs, device, f"{name}/", after)
            names = [one.name for one in self._functions[node.op].signature.output_arg]
            outputs = {one: [result] for one, result in zip(names, results, strict=True)}
        elif node.op in LOOPS:
            outputs, ended = {"output": self._loop(node, inputs, device, name, after)}, after
        elif node.op in (*CONDITIONS, *CASES):
            outputs, ended = {"output": self._condition(node, inputs, device, name)}, after
        elif node.op == "Identity" and not device:  # TensorFlow removes it where that saves a copy
            outputs, ended = {"output": inputs}, after | {one.operation for one in inputs}
        else:
            outputs = self._leaf(node, inputs, device, name, body)
            index = len(self.operations) - 1
            self.operations[index].after = after
            ended = after if node.op == "NoOp" else frozenset([index])
        body.outputs[node.name], body.ended[node.name] = outputs, ended

    def _leaf(self, node: Any, inputs: list[Output], device: str, name: str, body: _Body) -> dict[str, list[Output]]:
        kind = "Argument" if node.op == "Placeholder" else node.op
        signature = tf_kernels.signature(tf_kernels.op_def(node.op), node.attr)
        index = self._new(name, kind, device, signature, inputs)
        labels = [label.decode().removeprefix("loc:@") for label in node.attr["_class"].list.s]
        self.operations[index].colocated += [
            body.output(f"{label}:0").operation
            for label in labels
            if label != node.name and any(body.outputs.get(label, {}).values())
        ]
        outputs: dict[str, list[Output]] = {}
        for number, argument in enumerate(signature.outputs):
            outputs.setdefault(argument, []).append(Output(index, number))
        return outputs

    def _call(
        self,
        function: str,
        inputs: Sequence[Output],
        device: str,
        scope: str,
        after: frozenset[int] = frozenset(),
    ) -> tuple[list[Output], frozenset[int]]:
        """Add the operations of a function; return its results, and what must end before it has."""
        definition = self._functions[function]
        names = [one.name for one in definition.signature.input_arg]
        body = self.add_body(definition.node_def, dict(zip(names, inputs, strict=True)), device, scope, after)
        results = [definition.ret[one.name] for one in definition.signature.output_arg]
        ends = [*definition.control_ret.values(), *results]
        ended = frozenset[int]().union(*(body.ended.get(text.partition(":")[0], ()) for text in ends))
        return [body.output(text) for text in results], ended

    def _loop(self, node: Any, inputs: Sequence[Output], device: str, name: str, after: frozenset[int]) -> list[Output]:
        variables = [self._loop_variable(one, f"{name}/variable_{number}") for number, one in enumerate(inputs)]
        (holds,), _ = self._call(node.attr["cond"].func.name, variables, device, f"{name}/cond/")
        condition = self._new(f"{name}/LoopCond", "LoopCond", device, _signature(BOOL, ["input"], ["output"]), [holds])
        results, ended = self._call(node.attr["body"].func.name, variables, device, f"{name}/body/")
        self.operations[condition].after = after | ended  # all values of the body must have arrived
        for variable, first, result in zip(variables, inputs, results, strict=True):
            if variable != first:
                self.operations[variable.operation].inputs += [Output(condition, 0), result]
        return variables

    def _condition(self, node: Any, inputs: Sequence[Output], device: str, name: str) -> list[Output]:
        predicate, *others = inputs
        self._new(f"{name}/predicate", "Switch", device, self._like(predicate, "data", "pred"), [predicate] * 2)
        switched = [self._switched(one, predicate, f"{name}/input_{number}") for number, one in enumerate(others)]
        functions = [node.attr[f"{label}_branch"].func for label in ("then", "else")]
        if node.op in CASES:
            functions = list(node.attr["branches"].list.func)
        labels = ("then", "else") if node.op in CONDITIONS else [f"branch_{number}" for number in range(len(functions))]
        branches = [
            self._call(function.name, switched, device, f"{name}/{label}/")[0]
            for label, function in zip(labels, functions, strict=True)
        ]
        merged = enumerate(zip(*branches, strict=True))
        return [self._merge(values, device, f"{name}/output_{number}") for number, values in merged]

    def _loop_variable(self, first: Output, name: str) -> Output:
        """Add a variable of a loop, on the device of its first value, if that has asked for one."""
        source = self.operations[first.operation]
        if self._type(first) == RESOURCE:
            return first
        index = self._new(name, "Switch", source.requested, self._like(first, "data", "pred", "data"), [first])
        if source.kind == "Argument":  # its device is known before the others are chosen
            self.operations[index].colocated.append(first.operation)
        return Output(index, 0)

    def _switched(self, tensor: Output, predicate: Output, name: str) -> Output:
        if self._type(tensor) == RESOURCE:
            return tensor
        requested = self.operations[tensor.operation].requested
        index = self._new(name, "Switch", requested, self._like(tensor, "data", "pred"), [tensor, predicate])
        self.operations[index].colocated.append(tensor.operation)
        return Output(index, 0)

    def _merge(self, values: Sequence[Output], device: str, name: str) -> Output:
        if self._type(values[0]) == RESOURCE:
            return values[0]
        signature = _signature(self._type(values[0]), ["inputs"] * len(values), ["output"])
        return Output(self._new(name, "Merge", device, signature, values), 0)

    def _type(self, output: Output) -> int:
        return self.operations[output.operation].signature.output_types[output.number]

    def _like(self, output: Output, *inputs: str) -> tf_kernels.Signature:
        return _signature(self._type(output), inputs, ["output_true"])

    def _new(self, name: str, kind: str, device: str, signature: tf_kernels.Signature, inputs: Sequence[Output]) -> int:
        self.operations.append(Operation(name, kind, device, signature, list(inputs)))
        return len(self.operations) - 1


class _Body:
    """The outputs of the nodes of one graph or function, by the texts that other nodes write for them."""

    def __init__(self, arguments: Mapping[str, Output], after: frozenset[int]) -> None:
        self._arguments, self._after = arguments, after
        self.outputs: dict[str, dict[str, list[Output]]] = {}
        self.ended: dict[str, frozenset[int]] = {}  # what must have ended before what waits for a node begins

    def after(self, inputs: Sequence[str]) -> frozenset[int]:
        """Return the operations that must end before a node begins, by its control inputs, or those of the call."""
        found = [self.ended.get(text[1:], ()) for text in inputs if text.startswith("^")]
        return frozenset[int]().union(*found) if inputs else self._after

    def output(self, text: str) -> Output:
        """Return what "x", "x:1", or within a function "x:output:1", means."""
        name, *place = text.split(":")
        if name in self._arguments:
            return self._arguments[name]
        outputs = self.outputs[name]
        if len(place) == 2:
            return outputs[place[0]][int(place[1])]
        return [output for some in outputs.values() for output in some][int(place[0]) if place else 0]


def _signature(kind: int, inputs: Sequence[str], outputs: Sequence[str]) -> tf_kernels.Signature:
    return tf_kernels.Signature((("T", (kind,)),), tuple(inputs), tuple(outputs), (kind,) * len(outputs))


# The placed graph: the device of each operation, and the copies.


def choose_devices(
    operations: Sequence[Operation], device_of: Callable[[str], str], arguments: Mapping[str, str], default: str
) -> list[str]:
    """Return the device of each operation, from those of the arguments and of operations that request none."""
    groups = _groups(operations)
    members = collections.defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    of_group = {
        group: _device_of_group([operations[index] for index in indices], device_of, arguments, default)
        for group, indices in members.items()
    }
    chosen = [of_group[group] for group in groups]
    is_free = [
        len(members[group]) == 1 and not operations[index].requested and operations[index].kind != "Argument"
        for index, group in enumerate(groups)
    ]
    consumers = _consumers(operations)
    for index, operation in enumerate(operations):
        if is_free[index] and operation.kind in METADATA and has_kernel(operation, chosen[operation.inputs[0][0]]):
            chosen[index] = chosen[operation.inputs[0].operation]
    for index, operation in enumerate(operations):
        targets = {chosen[one] for one in consumers[index]}
        if is_free[index] and not operation.inputs and len(targets) == 1 and has_kernel(operation, min(targets)):
            chosen[index] = min(targets)
    return chosen


def has_kernel(operation: Operation, device: str) -> bool:
    """Return whether an operation can run on a device; all of them can on the host."""
    return not device.startswith("GPU") or tf_kernels.gpu_kernel(operation.kind, operation.signature.types) is not None


def _device_of_group(
    group: Sequence[Operation], device_of: Callable[[str], str], arguments: Mapping[str, str], default: str
) -> str:
    """Return the device that all operations of a group share."""
    for operation in group:
        if operation.kind == "Argument":
            return arguments.get(operation.name, HOST)
    wanted = next((device_of(operation.requested) for operation in group if operation.requested), default)
    return wanted if all(has_kernel(operation, wanted) for operation in group) else HOST


def _groups(operations: Sequence[Operation]) -> list[int]:
    """Return a number for each operation, equal for those that share a device."""
    parents = list(range(len(operations)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for index, operation in enumerate(operations):
        for other in operation.colocated:
            parents[root(index)] = root(other)
        for source, number in operation.inputs:
            if operations[source].signature.output_types[number] == RESOURCE:
                parents[root(index)] = root(source)
    return [root(index) for index in range(len(operations))]


def _consumers(operations: Sequence[Operation]) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in operations]
    for index, operation in enumerate(operations):
        for source, _ in operation.inputs:
            found[source].add(index)
    return found


class Copy(NamedTuple):
    """An input of an operation that is read in another place than it was computed in.

    Attributes:
        output: What is read.
        origin: Where it lies.
        consumer: The index of the operation that reads it.
        number: The number of the input.
        target: Where it is read.
    """

    output: Output
    origin: str
    consumer: int
    number: int
    target: str


class PlacedGraph:
    """A lowered graph with the device of each operation, and the memory of each tensor."""

    def __init__(self, operations: Sequence[Operation], devices: Sequence[str]) -> None:
        self.operations, self.devices = operations, devices
        pairs = list(zip(operations, devices, strict=True))
        self._host_arguments = [_host_arguments(operation, device) for operation, device in pairs]
        self.lacks_kernel = [
            not has_kernel(operation, "GPU:0") and operation.kind != "Argument" for operation in operations
        ]
        self.copies = list(self._copies())

    def origin(self, output: Output) -> str:
        """Return where an output lies."""
        return self._place(output.operation, self.operations[output.operation].signature.outputs[output.number])

    def target(self, index: int, number: int) -> str:
        """Return where an operation reads an input."""
        return self._place(index, self.operations[index].signature.inputs[number])

    def computes(self, index: int) -> bool:
        """Return whether a GPU computes an operation."""
        operation = self.operations[index]
        if self.devices[index] == HOST or operation.kind in OF_MEMORY:
            return False
        numbers = range(len(operation.signature.outputs))
        return not numbers or any(self.origin(Output(index, number)) != HOST for number in numbers)

    def transfer(self, copy: Copy) -> Transfer:
        """Return a copy with the names of its operations."""
        source, consumer = self.operations[copy.output.operation], self.operations[copy.consumer]
        dtype, argument = "", ""  # of an order
        if copy.output in consumer.inputs:
            dtype = tf.as_dtype(source.signature.output_types[copy.output.number]).name
            argument = consumer.signature.inputs[copy.number]
        return Transfer(
            source.name, source.kind, dtype, copy.origin, consumer.name, consumer.kind, argument, copy.target
        )

    def _place(self, index: int, argument: str) -> str:
        return HOST if argument in self._host_arguments[index] else self.devices[index]

    def _copies(self) -> Iterator[Copy]:
        for index, operation in enumerate(self.operations):
            for number, output in enumerate(operation.inputs):
                # A handle of a variable is a name of it, which every place knows.
                if self.operations[output.operation].signature.output_types[output.number] == RESOURCE:
                    continue
                origin, target = self.origin(output), self.target(index, number)
                if origin != target:
                    yield Copy(output, origin, index, number, target)


def _ordered(graph: PlacedGraph) -> Iterator[Copy]:
    """Return one order between two places for each operation that begins after one of another place."""
    for index, operation in enumerate(graph.operations):
        places = {graph.devices[before]: before for before in sorted(operation.after)}
        for origin, before in places.items():
            if origin != graph.devices[index]:
                yield Copy(Output(before, 0), origin, index, 0, graph.devices[index])


def _host_arguments(operation: Operation, device: str) -> frozenset[str]:
    kernel = tf_kernels.gpu_kernel(operation.kind, operation.signature.types) if device != HOST else None
    return kernel.host_arguments if kernel is not None else frozenset()


def _on_host(graph: PlacedGraph) -> set[int]:
    """Return operations without a kernel for GPUs that read what a GPU computed, and whose results return there."""
    down = {copy.consumer for copy in graph.copies if copy.target == HOST}
    up = {copy.output.operation for copy in graph.copies if copy.origin == HOST}
    before, after = collections.defaultdict(set), collections.defaultdict(set)
    for index, operation in enumerate(graph.operations):
        for number, output in enumerate(operation.inputs):
            if graph.origin(output) == graph.target(index, number) == HOST:
                after[output.operation].add(index)
                before[index].add(output.operation)
    found = _reached(down, after) & _reached(up, before)
    return {index for index in found if graph.lacks_kernel[index]}


def _reached(begin: set[int], neighbours: Mapping[int, set[int]]) -> set[int]:
    found, new = set(begin), set(begin)
    while new:
        new = set().union(*(neighbours.get(one, ()) for one in new)) - found
        found |= new
    return found


def _detours(graph: PlacedGraph) -> list[Copy]:
    """Return what operations that request no device send from one GPU to another, made of what they received."""
    received = {copy.consumer for copy in graph.copies if copy.target == graph.devices[copy.consumer] != HOST}
    for index, operation in enumerate(graph.operations):
        if not operation.requested and any(
            one.operation in received and graph.origin(one) == graph.target(index, number) != HOST
            for number, one in enumerate(operation.inputs)
        ):
            received.add(index)
    return [
        copy
        for copy in graph.copies
        if HOST not in (copy.origin, copy.target)
        and copy.output.operation in received
        and not graph.operations[copy.output.operation].requested
    ]


def _bundles(graph: PlacedGraph) -> set[Output]:
    """Return the bundles of tensors that the step made, and did not receive from its data."""
    found: set[Output] = set()
    for index, operation in enumerate(graph.operations):
        carried = operation.kind in CARRYING and found.intersection(operation.inputs)
        if carried or operation.kind in BUNDLES:
            types = enumerate(operation.signature.output_types)
            found.update(Output(index, number) for number, one in types if one == VARIANT)
    return found


def _entries(graph: PlacedGraph) -> tuple[dict[tuple[int, str], int], list[Copy]]:
    parts: dict[Output, frozenset[int]] = {}  # the tensors of the batch of which a tensor of the host is a part
    counts: collections.Counter[tuple[int, str]] = collections.Counter()
    bundles = _bundles(graph)
    for index, operation in enumerate(graph.operations):
        numbers = range(len(operation.signature.outputs))
        of_data = operation.kind in OF_DATA and not bundles.intersection(operation.inputs)
        if of_data and graph.devices[index] != HOST:  # the whole batch enters there
            counts.update((number, graph.devices[index]) for number in numbers)
        moved = operation.inputs if operation.kind in MOVING else ()
        of_inputs = frozenset(part for one in moved for part in parts.get(one, ()))
        for number in numbers:
            own = frozenset([number]) if of_data else of_inputs
            if own and graph.origin(Output(index, number)) == HOST:
                parts[Output(index, number)] = own
    entered = {(copy.output, copy.target): copy for copy in reversed(graph.copies) if copy.output in parts}
    counts.update((part, device) for output, device in entered for part in parts[output])
    return dict(sorted(counts.items())), list(reversed(entered.values()))

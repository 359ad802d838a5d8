"""The operations of a traced TensorFlow function, with the memory of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfpar.planning.liveness import Node

# An output shares the memory of the first input.
_VIEWS = (
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "Reshape",
    "Snapshot",
    "Squeeze",
    "StopGradient",
)
# Kernels that write into the memory of an input that nothing else reads (`forward_input_or_allocate_output`).
_REUSING = frozenset(
    [
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Cast",
        "Ceil",
        "Cos",
        "Div",
        "DivNoNan",
        "Elu",
        "EluGrad",
        "Erf",
        "Exp",
        "Expm1",
        "Floor",
        "Inv",
        "LeakyRelu",
        "LeakyReluGrad",
        "Log",
        "Log1p",
        "LogSoftmax",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "Neg",
        "Pow",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Round",
        "Rsqrt",
        "RsqrtGrad",
        "Select",
        "SelectV2",
        "Selu",
        "SeluGrad",
        "Sigmoid",
        "SigmoidGrad",
        "Sign",
        "Sin",
        "Softmax",
        "Softplus",
        "SoftplusGrad",
        "Softsign",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tan",
        "Tanh",
        "TanhGrad",
        "Xdivy",
        "Xlogy",
        "ZerosLike",
    ]
)
# Their outputs are held by others: variables, arguments, and constants of the graph.
_HELD = ("Const", "Placeholder", "ReadVariableOp", "VarHandleOp")
# TensorFlow measures kernels, and those of fewer than 8,000 cycles run at once; on a CPU about this many bytes.
_CHEAP_BYTES = 32 << 10
_CHEAP = ("NoOp", *_HELD, *_VIEWS, "Shape", "Fill")


def read_graph(operations: Sequence[tf.Operation], on_gpu: bool, num_examples: int = 1) -> list[Node]:
    """Return the operations of a graph as nodes.

    Args:
        operations: Operations of one graph, in the order of their creation; tensors of others are arguments.
        on_gpu: Whether they run on a GPU.
        num_examples: The size of an axis that the graph leaves open.

    Example:
        >>> graph = tf.function(lambda x: tf.nn.relu(x) * 2.0).get_concrete_function(tf.zeros([8])).graph
        >>> nodes = read_graph(graph.get_operations(), on_gpu=False)
        >>> [node.output_bytes for node in nodes if node.reuses]
        [(32,), (32,)]
    """
    index_of = {op: index for index, op in enumerate(operations)}
    return [_node(op, index_of, on_gpu, num_examples) for op in operations]


def _node(op: tf.Operation, index_of: dict[tf.Operation, int], on_gpu: bool, num_examples: int) -> Node:
    known = [tensor for tensor in op.inputs if tensor.op in index_of]
    shares = op.type in _VIEWS and bool(known) and known[0] is op.inputs[0]
    sizes = [tensor_bytes(tensor, num_examples) for tensor in op.outputs]
    if op.type in _HELD or (op.type in _VIEWS and not shares):
        sizes = [0] * len(sizes)
    touched = sum(tensor_bytes(tensor, num_examples) for tensor in [*op.inputs, *op.outputs])
    views = [number if shares and number < len(known) else -1 for number in range(len(sizes))]
    return Node(
        inputs=tuple((index_of[tensor.op], tensor.value_index) for tensor in known),
        after=tuple(index_of[one] for one in op.control_inputs if one in index_of),
        output_bytes=tuple(0 if view >= 0 else size for size, view in zip(sizes, views, strict=True)),
        views=tuple(views),
        reuses=op.type in _REUSING,
        is_expensive=not on_gpu and op.type not in _CHEAP and touched > _CHEAP_BYTES,
    )


def tensor_bytes(tensor: tf.Tensor, num_examples: int) -> int:
    """Return the bytes of a tensor; 0 for one without values of its own, such as the handle of a variable.

    A list that a loop fills for its gradient has those of all its elements.

    Args:
        tensor: A tensor of a graph.
        num_examples: The size of an axis that the graph leaves open.

    Example:
        >>> tensor_bytes(tf.zeros([2, 3]), 1)
        24
    """
    if tensor.dtype == tf.variant:
        return _list_bytes(tensor, num_examples)
    if tensor.dtype in (tf.resource, tf.string) or tensor.shape.rank is None:
        return 0
    sizes = [num_examples if size is None else size for size in tensor.shape]
    return math.prod(sizes) * int(max(tensor.dtype.size, 1))


def _list_bytes(tensor: tf.Tensor, num_examples: int) -> int:
    """Return the bytes of a list of a loop that begins empty, and gets an element in each iteration; else 0."""
    begin = tensor.op.inputs[tensor.value_index].op if tensor.op.type in ("While", "StatelessWhile") else None
    if begin is None or begin.type != "EmptyTensorList":
        return 0
    shape, most = tf.get_static_value(begin.inputs[0]), _static_maximum(begin.inputs[1])
    if shape is None or most is None or most < 0:
        return 0
    sizes = [num_examples if size < 0 else int(size) for size in shape.flatten()]
    return most * math.prod(sizes) * int(max(begin.get_attr("element_dtype").size, 1))


def _static_maximum(tensor: tf.Tensor) -> int | None:
    """Return the value of a constant integer, or the maximum of constants: Keras gives its loops the longest length."""
    value = tf.get_static_value(tensor.op.inputs[0] if tensor.op.type == "Max" else tensor)
    return None if value is None else int(value.max())


def needed_operations(operations: Sequence[tf.Operation], results: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """Return the operations that results, or changes of state, need: TensorFlow prunes the others.

    Args:
        operations: Operations of one graph, in the order of their creation.
        results: Tensors of the graph.

    Example:
        >>> graph = tf.function(lambda x: (tf.abs(x), tf.exp(x))[0]).get_concrete_function(tf.zeros([8])).graph
        >>> [one.type for one in needed_operations(graph.get_operations(), graph.outputs)]
        ['Placeholder', 'Abs', 'Identity']
    """
    wanted = {tensor.op for tensor in results} | {op for op in operations if op.op_def.is_stateful and _writes(op)}
    waiting = list(wanted)
    while waiting:
        op = waiting.pop()
        new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - wanted
        wanted |= new
        waiting += new
    return [op for op in operations if op in wanted]


def _writes(op: tf.Operation) -> bool:
    return op.type.startswith(("Assign", "Resource", "Stateful")) or not op.outputs

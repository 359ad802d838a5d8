"""What the row numbers of a sparse gradient depend on, read from its traced graph without running it.

    tokens ─► cast ─► reshape ─► row numbers            examples: the batch has the rows of all its parts
    shape of the tokens ─► range ─► row numbers         positions: the longest part has the rows of the batch
    tokens ─► unique ─► row numbers                     distinct: each number once
    tokens ─► maximum over examples ─► row numbers      mixed: no part determines the rows of the batch

Operations not named here are taken to compute each example alone, as almost all do. If one mixes examples and the
outputs show it, the study refuses the layer; otherwise the sum of the rows is right anyway.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs import tf_graph


class Source(enum.IntEnum):
    """What a tensor depends on. Most operations return the largest source of their inputs.

    Attributes:
        CONSTANT: The same values in every part of a batch.
        EXTENT: A size or a maximum: that of the batch is the largest of its parts.
        POSITIONS: Numbers up to an extent, and values of variables.
        DISTINCT: Each value that occurs in some examples, once.
        MIXED: Several examples together, or their positions in the batch.
        EXAMPLES: Values of each example alone, in the order of the examples along the first axis.
    """

    CONSTANT = 0
    EXTENT = 1
    POSITIONS = 2
    DISTINCT = 3
    MIXED = 4
    EXAMPLES = 5


_RANDOM = ("Random", "Sampler", "Multinomial", "TruncatedNormal", "StatefulUniform", "StatefulStandardNormal")
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
# Stateful for TensorFlow, but their results follow from their inputs.
_PURE = {"LookupTableFindV2", "If", "While", "Case", "Assert"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_SAME_VALUES = {"Reshape", "ExpandDims", "Squeeze", "EnsureShape", "Transpose", "Reverse", "ReverseV2"}
_REDUCTIONS = {"Sum", "Mean", "Min", "Max", "Prod", "Any", "All", "ArgMin", "ArgMax", "Cumsum", "Cumprod"}
_UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
# The gradients of sums over looked-up rows have each row once.
_ROWS_OF_SUMS = {f"SparseSegment{kind}GradV2" for kind in ("Sum", "Mean", "SqrtN")}
# Different numbers stay different. Keras adds the number of rows to negative ones.
_ONE_TO_ONE = {"Identity", "Cast", "AddV2", "Sub", "Neg", "SelectV2", "Less", "StopGradient", *_SAME_VALUES}
_ARITHMETIC = {"AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "RealDiv", "Minimum", "Maximum", "Pow", "SelectV2"}
_OF_ALL_REPLICAS, _OF_EACH = "tfpar_rows_of_all_replicas", "tfpar_rows_of_each_replica"


def of_all_replicas(tensor: Any) -> Any:
    """Mark a tensor as equal on all replicas, such as the rows of the whole batch."""
    return tf.identity(tensor, _OF_ALL_REPLICAS)


def of_each_replica(tensor: Any) -> Any:
    """Mark a tensor as rows of the examples of the calling replica."""
    return tf.identity(tensor, _OF_EACH)


class Sources:
    """What the tensors of a graph depend on.

    Args:
        known: The sources of some tensors, by `tensor.ref()`. Any other graph input counts as values of examples, or as
            a size (`MIXED`) if it is a scalar.

    Example:
        >>> with tf.Graph().as_default():
        ...     tokens = tf.compat.v1.placeholder("int32", [None, 8])
        ...     flat = tf.reshape(tokens, [-1])
        ...     rows = flat + 1, tf.range(tf.reduce_max(tokens)), tf.unique(flat).y
        >>> [Sources().of(tensor).name for tensor in rows]
        ['EXAMPLES', 'POSITIONS', 'DISTINCT']
    """

    def __init__(self, known: Mapping[Any, Source] | None = None) -> None:
        self._known = {**(known or {})}
        self._captured: dict[Any, dict[Any, Any]] = {}

    def of(self, tensor: tf.Tensor) -> Source:
        """Return what a symbolic tensor depends on."""
        waiting = [tensor.op]
        while waiting:
            unknown = [tensor.op for tensor in waiting[-1].inputs if tensor.ref() not in self._known]
            if unknown:
                waiting += unknown
            else:
                self._add(waiting.pop())
        return self._known[tensor.ref()]

    def _add(self, op: Any) -> None:
        if any(output.ref() not in self._known for output in op.outputs):
            for output, source in zip(op.outputs, self._results(op), strict=True):
                self._known.setdefault(output.ref(), source)

    def _results(self, op: Any) -> Sequence[Source]:
        sources = [self._known[tensor.ref()] for tensor in op.inputs]
        if op.type in _CALLS:
            (graph,) = tf_graph.called_graphs(op)
            inner = Sources({tensor.ref(): source for tensor, source in zip(graph.inputs, sources, strict=True)})
            return [inner.of(output) for output in graph.outputs]
        if op.type == "IdentityN":
            return sources
        if op.type == "Unpack":
            return _unpacked(op, sources[0])
        if op.type in _UNIQUE and sources[0] > Source.POSITIONS:
            return [Source.DISTINCT, *[Source.MIXED] * (len(op.outputs) - 1)]
        if op.type in _ROWS_OF_SUMS and sources[1] > Source.POSITIONS:
            return [Source.MIXED, Source.DISTINCT]
        source = _result(op, sources) if sources else self._root(op)
        return [source] * len(op.outputs)

    def _root(self, op: Any) -> Source:
        """Return the source of an operation without inputs."""
        (tensor, *_) = op.outputs
        outer = self._outer(op.graph, tensor)
        if op.type == "Const" or tensor.dtype == tf.resource:
            return Source.CONSTANT
        if outer is not None:
            return self.of(outer) if tf.is_symbolic_tensor(outer) else Source.CONSTANT
        return Source.MIXED if tensor.shape.rank == 0 and tensor.dtype != tf.variant else Source.EXAMPLES

    def _outer(self, graph: Any, tensor: tf.Tensor) -> Any:
        """Return the outer tensor that a function captures as `tensor`; None if it is not captured."""
        if graph not in self._captured:
            self._captured[graph] = {inner.ref(): outer for outer, inner in getattr(graph, "captures", ())}
        return self._captured[graph].get(tensor.ref())


def _result(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of all outputs of an operation with inputs."""
    name, first, largest = op.name.rpartition("/")[2], sources[0], max(sources)
    if name.startswith(_OF_ALL_REPLICAS):
        return Source.CONSTANT
    if name.startswith(_OF_EACH) or any(word in op.type for word in _RANDOM):
        return Source.EXAMPLES
    if op.type in _READS:
        return Source.MIXED if largest == Source.DISTINCT else max(Source.POSITIONS, largest)
    if op.op_def.is_stateful and op.type not in _PURE:
        return Source.EXAMPLES
    if op.type in _RULES:
        return _RULES[op.type](op, sources)
    if op.type in _SAME_VALUES:
        return first
    if op.type in _REDUCTIONS:
        return _reduced(op, first)
    if Source.DISTINCT in sources and largest == Source.DISTINCT:
        others = [source for source in sources if source != Source.DISTINCT]
        return Source.DISTINCT if op.type in _ONE_TO_ONE and max(others, default=0) <= Source.EXTENT else Source.MIXED
    return Source.MIXED if op.type in _ARITHMETIC and Source.MIXED in sources else largest


def _shape(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of a shape, whose first element is the number of examples."""
    if sources[0] <= Source.EXTENT:
        return sources[0]
    return Source.EXTENT if sources[0] == Source.POSITIONS else Source.MIXED


def _is_shape(tensor: tf.Tensor, source: Source) -> bool:
    return bool(tensor.op.type == "Shape") and source == Source.MIXED


def _unpacked(op: Any, source: Source) -> list[Source]:
    along_first = op.get_attr("axis") == 0
    if _is_shape(op.inputs[0], source):
        return [Source.MIXED, *[Source.EXTENT] * (len(op.outputs) - 1)]
    taken = Source.MIXED if along_first and source == Source.EXAMPLES else source
    return [taken] * len(op.outputs)


def _sliced(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of a slice, which keeps that of examples along all of the first axis or all but one end."""
    begin, end, strides = (tf.get_static_value(tensor) for tensor in op.inputs[1:])
    from_start, to_end, skips = (op.get_attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis"))
    if _is_shape(op.inputs[0], sources[0]):
        return Source.MIXED if from_start or begin is None or begin[0] == 0 else Source.EXTENT
    if sources[0] not in (Source.DISTINCT, Source.EXAMPLES) or skips or op.get_attr("new_axis_mask") & 1:
        return max(sources)
    starts = from_start or (begin is not None and begin[0] == 1 and to_end)
    ends = to_end or (end is not None and end[0] == -1 and from_start)
    is_whole = starts and ends and strides is not None and abs(strides[0]) == 1
    return max(sources) if is_whole else Source.MIXED


def _cut_out(op: Any, sources: Sequence[Source]) -> Source:
    begin, size = (tf.get_static_value(tensor) for tensor in op.inputs[1:])
    is_whole = begin is not None and begin[0] == 0 and (size is None or size[0] == -1)
    return sources[0] if is_whole or sources[0] not in (Source.DISTINCT, Source.EXAMPLES) else Source.MIXED


def _gathered(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of rows gathered from a table, or from examples."""
    rows, numbers = sources[:2]
    axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    if _is_shape(op.inputs[0], rows):
        chosen = tf.get_static_value(op.inputs[1])
        return Source.EXTENT if chosen is not None and (chosen > 0).all() else Source.MIXED
    if rows <= Source.POSITIONS:
        return Source.MIXED if numbers == Source.DISTINCT else max(rows, numbers)
    if axis == 0 and not (op.type == "GatherV2" and op.get_attr("batch_dims")):
        return Source.EXAMPLES if numbers >= Source.MIXED else Source.MIXED
    return rows


def _reduced(op: Any, source: Source) -> Source:
    if source not in (Source.DISTINCT, Source.EXAMPLES):
        return source
    if not _is_along_first(op.inputs[1], op.inputs[0].shape.rank):
        return Source.EXAMPLES if source == Source.EXAMPLES else Source.MIXED
    return Source.EXTENT if op.type == "Max" else Source.MIXED


def _is_along_first(axes: tf.Tensor, rank: int | None) -> bool:
    """Return whether axes may include the first axis."""
    known = tf.get_static_value(axes)
    if known is None:
        return True
    return any(axis == 0 or rank is None or axis == -rank for axis in known.reshape([-1]))


def _sorted(op: Any, sources: Sequence[Source]) -> Source:
    return Source.MIXED if sources[0] == Source.EXAMPLES and op.inputs[0].shape.rank == 1 else max(sources)


def _ranged(op: Any, sources: Sequence[Source]) -> Source:
    largest = max(sources)
    if largest in (Source.CONSTANT, Source.POSITIONS):
        return largest
    return Source.POSITIONS if largest == Source.EXTENT else Source.MIXED


def _repeated(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of repeated values: `EXAMPLES` if the shape holds the number of examples."""
    shape, value = sources if op.type == "Fill" else sources[::-1]
    if value in (Source.DISTINCT, Source.MIXED):
        return Source.MIXED
    if shape >= Source.DISTINCT:
        return Source.EXAMPLES
    return max(value, Source.CONSTANT if shape == Source.CONSTANT else Source.POSITIONS)


def _joined(op: Any, sources: Sequence[Source]) -> Source:
    """Return the source of concatenated values; different sources along the first axis are `MIXED`."""
    is_new = op.type == "Pack"
    parts = sources if is_new else sources[:-1]
    along_first = op.get_attr("axis") == 0 if is_new else _is_along_first(op.inputs[-1], op.outputs[0].shape.rank)
    if not along_first or max(parts) <= Source.POSITIONS or {*parts} == {Source.EXAMPLES}:
        return max(sources)
    return Source.MIXED


def _split(op: Any, sources: Sequence[Source]) -> Source:
    axis, parts = (0, 1) if op.type == "Split" else (2, 0)
    along_first = _is_along_first(op.inputs[axis], op.inputs[parts].shape.rank)
    return Source.MIXED if along_first and sources[parts] == Source.EXAMPLES else sources[parts]


_RULES: dict[str, Callable[[Any, Sequence[Source]], Source]] = {
    **dict.fromkeys(("Shape", "Size"), _shape),
    "Rank": lambda op, sources: Source.CONSTANT,
    "StridedSlice": _sliced,
    "Slice": _cut_out,
    **dict.fromkeys(("GatherV2", "GatherNd"), _gathered),
    "TopKV2": _sorted,
    "Range": _ranged,
    **dict.fromkeys(("Fill", "BroadcastTo", "Tile"), _repeated),
    **dict.fromkeys(("ConcatV2", "Pack"), _joined),
    **dict.fromkeys(("Split", "SplitV"), _split),
}

"""Detection of batch-dependent layers, whose outputs change with micro-batches.

whole      [a b c d] ── call ── [A B C D]
halves     [a b]     ── call ── [A B]           equal to the whole if each example is independent of the others
               [c d] ── call ──     [C D]
neighbours [a b a b] ── call ── [A B . .]       for random layers: the same random numbers, other neighbours

Random numbers of a half differ from those of the whole. Typical numbers replace them in the first trial, and unusual
numbers in the next ones, which show effects of a small probability. All trials are seeded, so every process finds the
same layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfpar import data
from tfpar._compat import keras_model, python_draws, random_state, typical_draws
from tfpar.pipeline.graph.example_comparison import agree, close, example_axis, joined, part_of
from tfpar.pipeline.graph.ir import Call, Graph, Value, run
from tfpar.pipeline.graph.known_layers import is_batch_independent, layers_of, uses_batch_statistics
from tfpar.pipeline.graph.trial_batch import moving_statistics, trial_examples

# Batch-dependent layers that a trial may miss: random ones, and Equalization, which in Keras 3.15 has one histogram for
# the whole batch.
_BATCH_DEPENDENT = (layers.MixUp, layers.CutMix, layers.Equalization)
# The advice for a model that needs its whole batch, under Pipeline and Hybrid.
ON_WHOLE_BATCH = "use a Pipeline with num_microbatches=1"
_OF_RAGGED = "Convert ragged inputs in the dataset, with to_tensor(), or train on SingleDevice()."
# The advice in an error, from the comma or semicolon before it on, where it is of no use.
ADVICE_OF_PIPELINES = re.compile(
    rf"([;,] )(?:or )?{ON_WHOLE_BATCH}(?:,? or (?:set )?allow_batch_dependent_layers=True(?: to [^.]*)?)?"
)
# Number of trials with different random numbers.
NUM_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class BatchDependence:
    """The batch-dependent parts of a model.

    Args:
        calls: Names of the batch-dependent layer calls, without BatchNormalization.
        batch_normalizations: Names of the layer calls with a BatchNormalization that uses statistics of the batch.
        outputs: Names of the outputs of the model in which the examples are not the first axis.

    Example:
        >>> BatchDependence(calls=("attention_over_batch",)).outputs
        ()
    """

    calls: tuple[str, ...] = ()
    batch_normalizations: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def check_batch_independence(graph: Graph, inputs: Sequence[Any], training: bool = True) -> BatchDependence:
    """Raise an error if micro-batches would change the outputs of a model.

    BatchNormalization in training is accepted: it uses the statistics of each micro-batch.

    Args:
        graph: The model.
        inputs: A batch of its flat inputs, `[examples, ...]` each.
        training: Whether to check the model in training or in inference.

    Returns:
        What was found: layers with the statistics of a micro-batch at most.

    Raises:
        ValueError: If a layer call is batch-dependent, or the examples are not the first axis of an output.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> check_batch_independence(trace(model), [np.ones((4, 4))])
        BatchDependence(calls=(), batch_normalizations=(), outputs=())
    """
    found = find_batch_dependence(graph, inputs, training)
    if found.calls:
        names = ", ".join(map(repr, found.calls))
        raise ValueError(
            "Every layer must compute each example alone, or micro-batches change the result, received "
            f"{names}{'' if training else ' in inference'}, where an example depends on the others of its batch; "
            f"{ON_WHOLE_BATCH}, or allow_batch_dependent_layers=True to accept other results."
        )
    if found.outputs:
        raise ValueError(
            "Every output of a model must have the examples as its first axis, so that micro-batches are concatenated, "
            f"received {', '.join(map(repr, found.outputs))}; move the axis with keras.ops.transpose, or "
            f"{ON_WHOLE_BATCH}."
        )
    return found


def check_synchronized(graph: Graph) -> None:
    """Raise an error if a model has a BatchNormalization with statistics of the global batch.

    Args:
        graph: The model.

    Raises:
        ValueError: If a layer is `BatchNormalization(synchronized=True)`.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        >>> check_synchronized(trace(model))
    """
    for call in graph.calls:
        if any(isinstance(layer, layers.BatchNormalization) and layer.synchronized for layer in layers_of(call)):
            raise ValueError(
                f"BatchNormalization(synchronized=True) uses the statistics of the global batch, and in a pipeline "
                f"{call.name!r} receives one micro-batch at a time. Remove synchronized to normalize each micro-batch "
                f"by itself, or {ON_WHOLE_BATCH} or allow_batch_dependent_layers=True."
            )


def check_stateless(found: Iterable[keras.Layer]) -> None:
    """Raise an error if a recurrent layer keeps its state for the next batch.

    Args:
        found: The layers of a model at every depth.

    Raises:
        ValueError: If a layer has `stateful=True`.

    Example:
        >>> check_stateless([keras.layers.LSTM(2)])
    """
    for layer in found:
        if isinstance(layer, layers.RNN | layers.Bidirectional) and layer.stateful:
            raise ValueError(
                f"A stateful layer keeps a state for each position of the batch, and replicas and micro-batches divide "
                f"the positions, received {layer.name!r} with stateful=True. Remove stateful, or train on "
                "SingleDevice()."
            )


@random_state.preserved_random_state()
def find_batch_dependence(graph: Graph, inputs: Sequence[Any], training: bool = True) -> BatchDependence:
    """Find the batch-dependent layer calls of a model.

    Layers of Keras that are always batch-independent are recognized by their class. Every other layer call that an
    output depends on runs on four examples and on both halves of them. Weights and states, random ones included, do
    not change.

    Args:
        graph: The model.
        inputs: Its flat inputs, `[examples, ...]` each. The trials use the first four examples, or four variations of
            a single example.
        training: Whether the layers run in training or in inference. A layer with random numbers that no seed
            reproduces is judged in inference.

    Returns:
        The names of the layer calls, in the order of the graph.

    Raises:
        ValueError: If a layer call does not run on any number of examples, keeps a state for each of them, or draws
            from NumPy or Python.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization(axis=0, name="mixes")])
        >>> find_batch_dependence(trace(model), [np.ones((4, 4))]).calls
        ('mixes',)
    """
    check_stateless(layer for call in graph.calls for layer in layers_of(call))
    inputs, is_ragged = trial_examples(inputs), any(isinstance(tensor, tf.RaggedTensor) for tensor in inputs)
    calls, size = _calls_of_outputs(graph), int(data.num_rows(inputs))
    if not is_ragged and all(is_batch_independent(call, training) for call in calls):
        return BatchDependence(
            batch_normalizations=tuple(call.name for call in calls if uses_batch_statistics(call, training))
        )
    last_use = {value: index for index, call in enumerate(calls) for value in call.inputs}
    model_outputs = [leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)]
    last_use |= dict.fromkeys(model_outputs, len(calls))
    with python_draws.noted(layer for call in calls for layer in layers_of(call)) as drawn:
        trial = _Trial(dict(zip(graph.inputs, inputs, strict=True)), training)
        for index, call in enumerate(calls):
            num_draws = len(drawn)
            try:
                trial.test(call)
            except (tf.errors.InvalidArgumentError, ValueError) as error:
                way_out = f"Declare the number of examples as None, or -1 in a reshape, or {ON_WHOLE_BATCH}."
                raise ValueError(
                    f"Every layer must run on any number of examples, and {call.name!r} does not run on {size // 2} "
                    f"and {size}: {str(error).splitlines()[0]} {_OF_RAGGED if is_ragged else way_out}"
                ) from error
            drawn[num_draws:] = [call.name] if len(drawn) > num_draws else []
            trial.release(value for value in [*call.inputs, *call.outputs] if last_use.get(value, -1) <= index)
    if drawn:
        raise python_draws.refusal(list(dict.fromkeys(drawn)), ON_WHOLE_BATCH)
    outputs = tuple(value.name for value in dict.fromkeys(model_outputs) if trial.axes[value] != 0)
    dependent = tuple(trial.batch_dependent)
    if trial.irreproducible and training:
        in_inference = find_batch_dependence(graph, inputs, training=False).calls
        names = {*dependent, *(name for name in trial.irreproducible if name in in_inference)}
        dependent = tuple(call.name for call in calls if call.name in names)
    return BatchDependence(dependent, tuple(trial.batch_normalizations), outputs)


class _Trial:
    """The values of a graph for a few examples, as a whole batch and as two halves of it."""

    def __init__(self, whole: dict[Value, Any], training: bool) -> None:
        self.batch_dependent: list[str] = []
        self.irreproducible: list[str] = []  # calls with different random numbers in each run
        self.batch_normalizations: list[str] = []
        # The axis of the examples; None for a value that does not depend on the batch.
        self.axes: dict[Value, int | None] = {}
        self._whole, self._training = whole, training
        self._halves: tuple[dict[Value, Any], dict[Value, Any]] = ({}, {})
        for value, tensor in whole.items():
            self._store_halves(value, 0, int(data.num_rows(tensor)) // 2)

    def release(self, values: Iterable[Value]) -> None:
        """Free the tensors of values after their last use."""
        for value in values:
            for tensors in (self._whole, *self._halves):
                tensors.pop(value, None)

    def test(self, call: Call) -> None:
        """Run a call, record whether it is batch-dependent, and store its outputs for the whole and both halves."""
        if uses_batch_statistics(call, self._training):
            self.batch_normalizations.append(call.name)
        is_ragged = any(isinstance(self._whole[value], tf.RaggedTensor) for value in call.inputs)
        all_rows = bool(call.inputs) and all(self.axes[value] == 0 for value in call.inputs)
        if is_batch_independent(call, self._training) and not is_ragged and all_rows:
            for value, tensor in zip(call.outputs, self._run(call, self._whole), strict=True):
                self._whole[value] = tensor
                self._store_halves(value, 0, int(data.num_rows(tensor)) // 2)
            return
        with typical_draws.typical_draws() as drawn:
            outputs = self._run_on_halves(call)
            differs = _differ(outputs)
            depends: bool | None = differs and not self._is_random(call)
        for value, tensor, one, other in outputs:
            axis = example_axis(tensor, one, other)
            self._whole[value] = tensor
            self._store_halves(value, axis, 0 if axis is None else one.shape[axis])
        if not depends and (differs or drawn):
            depends = self._depends_at_random(call, drawn)
        if depends is None:
            self.irreproducible.append(call.name)
        if depends or (self._training and isinstance(call.operation, _BATCH_DEPENDENT)):
            self.batch_dependent.append(call.name)

    def _depends_at_random(self, call: Call, drawn: Sequence[str]) -> bool | None:
        """Return whether a call is batch-dependent for some random numbers; None if no seed reproduces them."""
        unusual: tuple[float, ...] = ()
        seeds = range(1)
        if not typical_draws.is_dropout(drawn):
            unusual, seeds = typical_draws.UNUSUAL, range(NUM_SEEDS)
        for quantile in unusual:
            # A call that fails for unusual numbers is not judged by them.
            with contextlib.suppress(tf.errors.OpError, ValueError), typical_draws.typical_draws(quantile):
                if _differ(self._run_on_halves(call)) and not self._is_random(call):
                    return True
        results = {self._depends_on_neighbours(call, seed) for seed in seeds}
        return True if True in results else None if None in results else False

    def _run_on_halves(self, call: Call) -> list[tuple[Value, Any, Any, Any]]:
        """Run a call on the whole batch and on both halves; return each output with its three tensors."""
        runs = [self._run(call, tensors) for tensors in (self._whole, *self._halves)]
        return list(zip(call.outputs, *runs, strict=True))

    def _store_halves(self, value: Value, axis: int | None, size: int) -> None:
        """Store the halves of a whole value as inputs of later calls, so that these are checked separately."""
        self.axes[value] = axis
        tensor = self._whole[value]
        if axis is None:
            parts = [tensor, tensor]
        else:
            parts = [part_of(tensor, 0, size, axis), part_of(tensor, size, tensor.shape[axis], axis)]
        for half, part in zip(self._halves, parts, strict=True):
            half[value] = part

    def _is_random(self, call: Call) -> bool:
        """Return whether a call has random numbers that typical numbers do not replace, so that halves differ."""
        one = self._run(call, self._whole)
        others = (self._run(call, self._whole, seed) for seed in range(1, 1 + NUM_SEEDS))
        return not all(close(*pair) for other in others for pair in zip(one, other, strict=True))

    def _depends_on_neighbours(self, call: Call, seed: int) -> bool | None:
        """Return whether the first half changes with the second, for the same random numbers in both runs.

        None if no seed reproduces the random numbers.
        """
        neighbours = dict(self._whole)
        for value in call.inputs:
            axis, first = self.axes[value], self._halves[0][value]
            if axis is not None:
                masks = keras_model.mask_of(first)
                doubled = joined(first, first, axis)
                neighbours[value] = keras_model.with_mask(
                    doubled, None if masks is None else tf.concat([masks, masks], axis)
                )
        runs = [self._run(call, tensors, seed) for tensors in (self._whole, self._whole, neighbours)]
        for value, one, repeated, other in zip(call.outputs, *runs, strict=True):
            axis = self.axes[value]
            if not close(one, repeated):
                return None
            if axis is not None:
                one, other = (part_of(tensor, 0, one.shape[axis] // 2, axis) for tensor in (one, other))
            if not close(one, other):
                return True
        return False

    def _run(self, call: Call, tensors: dict[Value, Any], seed: int = 0) -> list[Any]:
        """Run a call on copies of its weights and states.

        Args:
            call: The layer call.
            tensors: Its inputs.
            seed: Runs with the same seed have the same random numbers.
        """
        values = {value: tensors[value] for value in call.inputs}
        # Weights may be on several devices, and operations compiled with XLA read weights of their own device only.
        states = {id(variable): (variable, tf.identity(variable.value)) for variable in call.variables}
        random_states = [random_state.state_of_no_layer(), *typical_draws.seed_states(layers_of(call))]
        states |= {id(state): (state, value) for state, value in random_state.seeded(random_states, seed)}
        statistics = moving_statistics() if self._training else contextlib.nullcontext()
        with keras.StatelessScope(list(states.values())), statistics:
            run([call], values, training=self._training)
        return [values[value] for value in call.outputs]


def _differ(outputs: Iterable[tuple[Value, Any, Any, Any]]) -> bool:
    """Return whether the outputs of a call differ between the whole and its halves."""
    return not all(agree(whole, one, other, example_axis(whole, one, other)) for _, whole, one, other in outputs)


def _calls_of_outputs(graph: Graph) -> list[Call]:
    """Return the calls that outputs of the model depend on; the others have only losses and states."""
    needed_values = {leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)}
    needed_calls = []
    for call in reversed(graph.calls):
        if needed_values.intersection(call.outputs):
            needed_values.update(call.inputs)
            needed_calls.append(call)
    return needed_calls[::-1]

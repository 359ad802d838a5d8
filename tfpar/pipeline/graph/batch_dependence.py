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

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfpar import data
from tfpar._compat import python_draws, random_state
from tfpar.messages.reasons import reason_of
from tfpar.pipeline.graph.dependence_trial import Trial
from tfpar.pipeline.graph.ir import Call, Graph, Value
from tfpar.pipeline.graph.known_layers import in_dataset, is_batch_independent, layers_of, uses_batch_statistics
from tfpar.pipeline.graph.trial_batch import trial_examples

# The advice for a model that needs its whole batch, under Pipeline and Hybrid.
ON_WHOLE_BATCH = "use a Pipeline with num_microbatches=1"
_OF_RAGGED = "Convert ragged inputs in the dataset, with to_tensor(), or train on SingleDevice()."
# The advice in an error, from the comma or semicolon before it on, where it is of no use.
ADVICE_OF_PIPELINES = re.compile(
    rf"([;,] )(?:or )?{ON_WHOLE_BATCH}(?:,? or (?:set )?allow_batch_dependent_layers=True(?: to [^.]*)?)?"
)


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
            f"{_in_dataset(graph.calls, found.calls)}"
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


def check_sizes(found: Iterable[keras.Layer], training: bool) -> None:
    """Raise an error if a layer distorts other images where the size of a batch is unknown while a step is traced.

    In steps on parts of a batch it is unknown, in a trial and in most steps on one device it is known.

    Args:
        found: The layers of a model at every depth.
        training: Whether the model trains; in inference images stay as they are.

    Raises:
        ValueError: If the model trains with a `RandomElasticTransform`.

    Example:
        >>> check_sizes([keras.layers.RandomElasticTransform()], training=False)
    """
    for layer in found:
        if training and isinstance(layer, layers.RandomElasticTransform):
            raise ValueError(
                "Every layer must compute each example alone, or parts of a batch change the result, received "
                f"{layer.name!r}: RandomElasticTransform of Keras {keras.__version__} replaces all images by the "
                "distorted first one, where a step does not know the size of its batch. Call the layer in the dataset, "
                "with batches of a fixed size, or train on SingleDevice()."
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
        ValueError: If a layer call does not run on any number of examples, keeps a state for each of them, draws
            from NumPy or Python, or needs to know how many there are.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization(axis=0, name="mixes")])
        >>> find_batch_dependence(trace(model), [np.ones((4, 4))]).calls
        ('mixes',)
    """
    found = [layer for call in graph.calls for layer in layers_of(call)]
    check_stateless(found)
    check_sizes(found, training)
    calls, is_ragged = _calls_of_outputs(graph), any(isinstance(tensor, tf.RaggedTensor) for tensor in inputs)
    if not is_ragged and all(is_batch_independent(call, training) for call in calls):
        return BatchDependence(
            batch_normalizations=tuple(call.name for call in calls if uses_batch_statistics(call, training))
        )
    examples, batch = trial_examples(inputs), dict(zip(graph.inputs, inputs, strict=True))
    last_use = {value: index for index, call in enumerate(calls) for value in call.inputs}
    model_outputs = [leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)]
    last_use |= dict.fromkeys(model_outputs, len(calls))
    with python_draws.noted(layer for call in calls for layer in layers_of(call)) as drawn:
        trial = Trial(dict(zip(graph.inputs, examples, strict=True)), training)
        unchanged = None if is_ragged else _Unchanged(graph, calls, inputs, training)
        for index, call in enumerate(calls):
            num_draws = len(drawn)
            try:
                trial.test(call)
            except (tf.errors.InvalidArgumentError, ValueError) as error:
                if unchanged is None or not unchanged.judges(trial, index):
                    if int(data.num_rows(inputs)) > int(data.num_rows(examples)):  # the whole batch, not its first rows
                        _check_runs(calls[: index + 1], batch, training)
                    raise _refusal(call, int(data.num_rows(examples)), error, is_ragged) from error
            drawn[num_draws:] = [call.name] if len(drawn) > num_draws else []
            trial.release(value for value in [*call.inputs, *call.outputs] if last_use.get(value, -1) <= index)
    if drawn:
        raise python_draws.refusal(list(dict.fromkeys(drawn)), ON_WHOLE_BATCH, _in_dataset(calls, drawn))
    outputs = tuple(value.name for value in dict.fromkeys(model_outputs) if trial.axes[value] != 0)
    dependent = tuple(trial.batch_dependent)
    if trial.irreproducible and training:
        in_inference = find_batch_dependence(graph, inputs, training=False).calls
        names = {*dependent, *(name for name in trial.irreproducible if name in in_inference)}
        dependent = tuple(call.name for call in calls if call.name in names)
    return BatchDependence(dependent, tuple(trial.batch_normalizations), outputs)


def _in_dataset(calls: Sequence[Call], names: Sequence[str]) -> str:
    return in_dataset(layer for call in calls if call.name in names for layer in layers_of(call))


class _Unchanged:
    """A trial on unchanged examples, for calls that fail on changed ones, as if they assert that rows sum to 1."""

    def __init__(self, graph: Graph, calls: Sequence[Call], inputs: Sequence[Any], training: bool) -> None:
        self._graph, self._calls, self._inputs, self._training = graph, calls, inputs, training
        self._trial: Trial | None = None
        self._num_tested = 0

    def judges(self, trial: Trial, index: int) -> bool:
        """Return whether a call runs on the unchanged examples; store its outputs in the trial on changed ones."""
        if self._trial is None:
            examples = trial_examples(self._inputs, changed=False)
            self._trial = Trial(dict(zip(self._graph.inputs, examples, strict=True)), self._training)
        try:
            for call in self._calls[self._num_tested : index + 1]:
                self._trial.test(call)
                self._num_tested += 1
            trial.adopt(self._calls[index], self._trial)
        except (tf.errors.InvalidArgumentError, ValueError):
            return False
        return True


def _check_runs(calls: Sequence[Call], batch: Mapping[Value, Any], training: bool) -> None:
    """Raise the error of a call that fails on the whole batch too, as on one device."""
    try:
        Trial(dict(batch), training).run_whole(calls)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        raise ValueError(
            f"{calls[-1].name!r} fails on the first batch, as on one device: {reason_of(error)}."
        ) from error
    except tf.errors.ResourceExhaustedError:
        return


def _refusal(call: Call, size: int, error: Exception, is_ragged: bool) -> ValueError:
    way_out = f"Declare the number of examples as None, or -1 in a reshape, or {ON_WHOLE_BATCH}."
    return ValueError(
        f"Every layer must run on any number of examples, and {call.name!r} does not run on {size // 2} and {size}: "
        f"{reason_of(error)}. {_OF_RAGGED if is_ragged else way_out}"
    )


def _calls_of_outputs(graph: Graph) -> list[Call]:
    """Return the calls that outputs of the model depend on; the others have only losses and states."""
    needed_values = {leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)}
    needed_calls = []
    for call in reversed(graph.calls):
        if needed_values.intersection(call.outputs):
            needed_values.update(call.inputs)
            needed_calls.append(call)
    return needed_calls[::-1]

"""All stages of a model compiled, each for what those before it send and those behind it send back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.execution.stage_program import StageProgram
from tfpar.pipeline.execution.stage_values import ValueSpec
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.reduction.gradient_addition import spec_of
from tfpar.reduction.losses_in_call import Way


class Programs(NamedTuple):
    """The compiled stages of a model.

    Args:
        stages: One program each.
        outputs: The model's flat outputs.
        flows: What is known of each value that travels.
    """

    stages: list[StageProgram]
    outputs: tuple[Value, ...]
    flows: dict[Value, ValueSpec]


def compile_stages(
    stages: Sequence[Stage],
    inputs: dict[Value, ValueSpec],
    outputs: Sequence[Value],
    devices: Sequence[str],
    ways: Sequence[Way] = (),
    **options: Any,
) -> Programs:
    """Compile the stages of a model, each for what those before it send.

    Args:
        stages: The stages in order.
        inputs: What is known of the model's inputs.
        outputs: The model's flat outputs.
        devices: One a stage.
        ways: What the losses that layers compute need of the whole batch, in the order of the stages.
        **options: As for `StageProgram`.
    """
    flows, left = dict(inputs), tuple(ways)
    programs = []
    for stage, device in zip(stages, devices, strict=True):
        program = StageProgram(stage, [flows[value] for value in stage.inputs], device, ways=left, **options)
        left = left[len(program.ways) :]
        flows.update(zip(stage.outputs, program.sends, strict=True))
        programs.append(program)
    return Programs(programs, tuple(outputs), flows)


def without_dead_ends(programs: Programs, live: Iterable[Value], **options: Any) -> Programs:
    """Compile again the stages that make what no loss depends on: weights behind that have no gradient, not zero.

    Keras leaves a weight without a gradient alone, and decays one whose gradient is zero.

    Args:
        programs: The compiled stages.
        live: The outputs of the model that the loss sends a gradient for.
        **options: As for `StageProgram`.
    """
    alive, stages = set(live), list(programs.stages)
    for index, program in reversed(list(enumerate(programs.stages))):
        sends = zip(program.stage.outputs, program.sends, strict=True)
        unused_outputs = frozenset(value for value, flow in sends if flow.needs_gradient and value not in alive)
        if unused_outputs:
            taken = [programs.flows[value] for value in program.stage.inputs]
            stages[index] = StageProgram(
                program.stage, taken, program.device, unused_outputs=unused_outputs, ways=program.ways, **options
            )
        back = zip(program.stage.inputs, stages[index].sends_back, strict=True)
        alive |= {value for value, goes_back in back if goes_back}
    return programs._replace(stages=stages)


class StagesOfModel:
    """The stages of one model, compiled when first asked for, and kept when the model is compiled again by Keras.

    What they compute depends on the weights that train and on XLA, not on losses, metrics or the optimizer.

    Args:
        model: A built model.
        graph: Its operations.
        stages: Its stages.
        devices: One a stage.
        recompute: Whether the backward pass runs the forward pass again.
        splits_backward: Whether weight gradients are functions of their own.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: Graph,
        stages: Sequence[Stage],
        devices: Sequence[str],
        *,
        recompute: bool,
        splits_backward: bool,
    ) -> None:
        self.graph, self.stages, self.devices = graph, stages, devices
        self._model = model
        self._of_training = {"recompute": recompute, "splits_backward": splits_backward}
        self._compiled: dict[bool, tuple[Any, Programs]] = {}  # evaluate and predict have theirs in common

    def programs(self, inputs: Any, trainable: Any, ways: Sequence[Way] = (), *, training: bool) -> Programs:
        """Return the compiled stages.

        Args:
            inputs: Specs of a batch of any size, in the structure that the model is called with.
            trainable: A key of the weights that train.
            ways: What the losses that layers compute need of the whole batch, in the order of the stages.
            training: Whether the model trains.
        """
        key = str(inputs), trainable, bool(self._model.jit_compile), tuple(ways)
        if training not in self._compiled or self._compiled[training][0] != key:
            outputs = keras.tree.flatten(self.graph.outputs)
            options = self._options(training=training)
            programs = compile_stages(self.stages, self._flows(inputs), outputs, self.devices, ways, **options)
            self._compiled[training] = key, programs
        return self._compiled[training][1]

    def without_dead_ends(self, programs: Programs, live: Iterable[Value]) -> Programs:
        """Return stages that train, without what no loss depends on.

        Args:
            programs: The compiled stages.
            live: The outputs of the model that the loss sends a gradient for.
        """
        return without_dead_ends(programs, live, **self._options(training=True))

    def _options(self, *, training: bool) -> dict[str, Any]:
        options = {
            "training": training,
            "jit_compile": bool(self._model.jit_compile),
            "model_variables": self._model.variables,
        }
        return options | self._of_training if training else options

    def _flows(self, inputs: Any) -> dict[Value, ValueSpec]:
        """Return what is known of the model's inputs."""

        def flat(inputs: Any) -> list[tf.Tensor]:
            return model_graph.standardize(self._model, inputs)

        tensors = tf.function(flat, autograph=False).get_concrete_function(inputs).structured_outputs
        return {value: ValueSpec(spec_of(one)) for value, one in zip(self.graph.inputs, tensors, strict=True)}

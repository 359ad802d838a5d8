"""The compiled stages of a model, each for the values that it receives from other stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_model, keras_variables
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.compiled_stage import StageOptions, StageProgram
from tfpar.pipeline.stages.padding import fixed_shape
from tfpar.pipeline.stages.shards import DividedCalls
from tfpar.pipeline.stages.stage_compilation import EqualStages, compile_stage
from tfpar.pipeline.stages.staged_model import StagedModel
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction.gradient_addition import spec_of
from tfpar.reduction.losses_in_call import Way


class Programs(NamedTuple):
    """The compiled stages of a model.

    Args:
        stages: The program of each stage.
        outputs: The model's flat outputs.
        specs: The spec of each value that a stage receives or sends.
    """

    stages: list[StageProgram]
    outputs: tuple[Value, ...]
    specs: dict[Value, ValueSpec]

    def on(self, devices: Sequence[str]) -> Programs:
        """Return the stages for other devices, one for each stage."""
        return self._replace(stages=[one.on(device) for one, device in zip(self.stages, devices, strict=True)])


def compile_stages(
    stages: Sequence[Stage],
    inputs: dict[Value, ValueSpec],
    outputs: Sequence[Value],
    devices: Sequence[str],
    options: StageOptions,
    ways: Sequence[Way] = (),
) -> Programs:
    """Compile the stages of a model, each for the values that earlier stages send.

    Args:
        stages: The stages in order.
        inputs: The specs of the model's inputs.
        outputs: The model's flat outputs.
        devices: The device of each stage.
        options: How they are compiled.
        ways: What the losses computed by layers need of the whole batch, in the order of the stages.
    """
    specs, remaining = dict(inputs), tuple(ways)
    programs, equal = [], EqualStages(options, {}, {})
    for stage, device in zip(stages, devices, strict=True):
        program = compile_stage(stage, [specs[value] for value in stage.inputs], device, equal, ways=remaining)
        remaining = remaining[len(program.ways) :]
        inputs_after = zip(stage.inputs, program.trace.unmasked, strict=True)
        specs.update((one, dataclasses.replace(specs[one], mask=None)) for one, unmasked in inputs_after if unmasked)
        specs.update(zip(stage.outputs, program.output_specs, strict=True))
        programs.append(program)
    return Programs(programs, tuple(outputs), specs)


def without_dead_ends(programs: Programs, live: Iterable[Value], options: StageOptions) -> Programs:
    """Compile again the stages with outputs that no loss depends on, so that their weights have no gradient.

    Keras does not update a weight without a gradient, but decays one whose gradient is zero.

    Args:
        programs: The compiled stages.
        live: The outputs of the model that the loss depends on.
        options: How they are compiled.
    """
    alive, stages, equal = set(live), list(programs.stages), EqualStages(options, {}, {})
    for index, program in reversed(list(enumerate(programs.stages))):
        sends = zip(program.stage.outputs, program.output_specs, strict=True)
        unused_outputs = frozenset(value for value, spec in sends if spec.needs_gradient and value not in alive)
        if unused_outputs:
            stages[index] = compile_stage(
                program.stage, program.input_specs, program.device, equal,
                unused_outputs=unused_outputs, ways=program.ways,
            )  # fmt: skip
        back = zip(program.stage.inputs, stages[index].has_input_gradients, strict=True)
        alive |= {value for value, goes_back in back if goes_back}
    return programs._replace(stages=stages)


class StagesOfModel:
    """The stages of one model, compiled on first use, and cached for later calls of the model's `compile`.

    They depend on the trained weights and on XLA, not on losses, metrics or the optimizer.

    Args:
        model: A built model.
        graph: Its layer calls.
        stages: Its stages.
        devices: The device of each stage.
        recompute: Whether the backward pass recomputes the forward pass.
        splits_backward: Whether the weight gradient is a subgraph of its own.
        accumulates: Whether a replica has several micro-batches.
        shards_weights: Whether a device holds copies of the weights of a stage during an action alone.
        divided: The divided layer calls of each stage; None for stages on one device each.
        groups: The devices of the shards of a stage, by the first of them.
        pads: Whether stages that XLA compiles may pad micro-batches to one size: all layers are batch-independent, and
            random layers differ from those of one device anyway.
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
        accumulates: bool,
        shards_weights: bool,
        pads: bool,
        divided: Mapping[int, DividedCalls] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.staged = StagedModel(model, graph, stages, devices)
        self._recompute, self._splits_backward, self._pads = recompute, splits_backward, pads
        self._accumulates, self._shards_weights = accumulates, shards_weights
        self._divided, self._groups = divided or {}, groups or {}
        self._compiled: dict[bool, tuple[Any, Programs]] = {}  # evaluate and predict share theirs

    def programs(self, inputs: Any, trainable: Any, ways: Sequence[Way] = (), *, training: bool) -> Programs:
        """Return the compiled stages.

        Args:
            inputs: Specs of a batch of any size, in the structure that the model is called with.
            trainable: A key of the trained weights.
            ways: What the losses computed by layers need of the whole batch, in the order of the stages.
            training: Whether the model is trained.
        """
        options = self._options(training=training)
        key = str(inputs), trainable, options.jit_compile, options.pads_lookups, tuple(ways)
        if training not in self._compiled or self._compiled[training][0] != key:
            outputs = keras.tree.flatten(self.staged.graph.outputs)
            programs = compile_stages(
                self.staged.stages, self._input_specs(inputs), outputs, self.staged.devices, options, ways
            )
            self._compiled[training] = key, programs
        return self._compiled[training][1]

    def without_dead_ends(self, programs: Programs, live: Iterable[Value]) -> Programs:
        """Return stages for training, without gradients of outputs that no loss depends on.

        Args:
            programs: The compiled stages.
            live: The outputs of the model that the loss depends on.
        """
        return without_dead_ends(programs, live, self._options(training=True))

    def _options(self, *, training: bool) -> StageOptions:
        model = self.staged.model
        return StageOptions(
            training,
            accumulates=self._accumulates,
            shards_weights=self._shards_weights,
            recompute=training and self._recompute,
            splits_backward=training and self._splits_backward,
            # XLA compiles the operations of one device.
            jit_compile=bool(model.jit_compile) and not self._divided,
            pads=bool(model.jit_compile) and not self._divided and self._pads,
            # An added row is zero, and adds nothing in Keras' own optimizers, which square each row of the same number
            # separately; one of the user may count the rows.
            pads_lookups=not training or keras_model.is_of_keras(keras_variables.innermost(model.optimizer)),
            model_variables=model.variables,
            divided=self._divided,
            groups=self._groups,
            in_pieces=self._scores() if self._divided else frozenset(),
        )

    def _scores(self) -> frozenset[Value]:
        """Return the outputs of the model that no stage takes: the last stage sends them to the loss."""
        return frozenset(self.staged.stages[-1].outputs).intersection(keras.tree.flatten(self.staged.graph.outputs))

    def _input_specs(self, inputs: Any) -> dict[Value, ValueSpec]:
        """Return the specs of the model's inputs."""

        def flat(inputs: Any) -> list[tf.Tensor]:
            return model_graph.standardize(self.staged.model, inputs)

        tensors = tf.function(flat, autograph=False).get_concrete_function(inputs).structured_outputs
        found = zip(self.staged.graph.inputs, map(spec_of, tensors), strict=True)
        return {value: ValueSpec(spec, per_example=fixed_shape(spec)) for value, spec in found}

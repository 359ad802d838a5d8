"""A schedule lowered to one TensorFlow graph: every action a function call on its device, in the device's order.

device 0   F0.0 ─► F0.1 ─────────► B0.0 ─► B0.1       ─►  the order of the device: a control dependency
             └─┐      └─┐          ┌─┘       ┌─┘       ┐  a transfer: TensorFlow sends an activation or a gradient
device 1      F1.0 ─► B1.0 ─► F1.1 ─► B1.1             └  as soon as it is computed, while both devices compute
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import tf_function
from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.loss_program import LossPart
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.stage_values import Forward, MaskedTensor, Place
from tfpar.pipeline.execution.step_state import StepVariables
from tfpar.pipeline.graph.tracing import Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.schedule import Action
from tfpar.reduction.gradient_addition import sum_on, tensors_of


@dataclasses.dataclass(frozen=True)
class Moment:
    """When an action ran, in seconds of TensorFlow's clock (float64 scalars)."""

    action: Action
    begin: tf.Tensor
    end: tf.Tensor


class Execution:
    """One run of a schedule over the micro-batches of one global batch, while a step is traced.

    Args:
        programs: The compiled stages.
        microbatches: The micro-batches of the batch.
        inputs: The inputs of the graph for each micro-batch.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
        added_factors: For each micro-batch, the weight of each added loss in the loss of the batch, in the order of the
            stages.
        loss: Computes the loss of a micro-batch; None for prediction.
        sums_in_call: The sum and weight over the whole batch of each loss computed by a layer, in the order of the
            stages, float64 `[losses, 2]`; None where no loss is computed.
        timed: Whether to measure when each action runs.
    """

    def __init__(
        self,
        programs: Programs,
        microbatches: Sequence[Microbatch],
        inputs: Sequence[dict[Value, tf.Tensor]],
        scale: tf.Tensor,
        added_factors: Sequence[Sequence[tf.Tensor]] = (),
        loss: Callable[[Execution, int, list[MaskedTensor]], LossPart] | None = None,
        sums_in_call: tf.Tensor | None = None,
        *,
        timed: bool = False,
    ) -> None:
        self._programs, self.microbatches, self._scale = programs, microbatches, scale
        self._timed, self._added_factors, self._loss = timed, added_factors, loss
        self.devices = [program.device for program in programs.stages]
        sizes = [len(program.ways) for program in programs.stages]
        sums = tf.zeros([sum(sizes), 2], tf.float64) if sums_in_call is None else sums_in_call
        self._sums_in_call = tf.split(sums, sizes)
        self._values = [{value: MaskedTensor(tensor) for value, tensor in tensors.items()} for tensors in inputs]
        self._arrived: dict[tuple[Value, int, str], MaskedTensor] = {}
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._upstream: dict[tuple[Value, int], list[tf.Tensor]] = collections.defaultdict(list)
        self._before: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        self._variables = StepVariables(programs.stages)
        self._gradients: list[list[Any] | None] = [None] * len(programs.stages)
        self.losses: list[tf.Tensor] = []
        self.loss_parts: list[LossPart] = []
        self.moments: list[Moment] = []

    def run(self, actions: Iterable[Action]) -> None:
        """Add actions to the graph, in an order in which each comes after those that it depends on."""
        for action in actions:
            device = self.devices[action.stage]
            if action.kind == "F":
                values = [self._on(value, action.microbatch, device) for value in self._stage(action).inputs]
                arrived = tensors_of([value.tensor for value in values])
                self._at(action, device, arrived, functools.partial(self._forward, action, values))
            elif action.kind == "B":
                upstream = [self._sum(value, action.microbatch, device) for value in self._stage(action).outputs]
                arrived = [gradient for gradient in upstream if gradient is not None]
                self._at(action, device, arrived, functools.partial(self._backward, action, upstream))
            else:
                self._at(action, device, [], functools.partial(self._weights, action))

    def outputs(self, microbatch: int) -> list[MaskedTensor]:
        """Return the model's flat outputs for a micro-batch, on the last stage's device."""
        return [self._on(value, microbatch, self.devices[-1]) for value in self._programs.outputs]

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight, summed over micro-batches and stages, by the weight's `id`."""
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for program, gradients in zip(self._programs.stages, self._gradients, strict=True):
            for variable, gradient in zip(
                program.parameters, program.joined(gradients) if gradients else [], strict=False
            ):
                if gradient is not None:
                    found[id(variable)].append(gradient)
        return {key: sum_on(None, gradients) for key, gradients in found.items()}

    def state(self, variable: keras.Variable, microbatch: int) -> tf.Tensor:
        """Return the value of a state for a micro-batch, after the actions so far, on the last stage's device."""
        return self._variables.state(variable, microbatch, self.devices[-1])

    def note(self, variables: Sequence[keras.Variable], microbatch: int, states: Sequence[tf.Tensor]) -> None:
        """Note the values of states after the loss of a micro-batch."""
        self._variables.note(variables, microbatch, states, self.microbatches[microbatch])

    def new_states(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return each changed state with its value after the step."""
        return self._variables.new_states()

    @property
    def ends(self) -> list[tf.Tensor]:
        """Tensors of the last action of each device: after them, all actions have run."""
        return [tensor for tensors in self._before.values() for tensor in tensors]

    def _stage(self, action: Action) -> Stage:
        return self._programs.stages[action.stage].stage

    def _on(self, value: Value, microbatch: int, device: str) -> MaskedTensor:
        """Return a value on a device; it is sent there once, as soon as it is computed."""
        key = (value, microbatch, device)
        if key not in self._arrived:
            self._arrived[key] = self._values[microbatch][value].on(device)
        return self._arrived[key]

    def _sum(self, value: Value, microbatch: int, device: str) -> tf.Tensor | None:
        return sum_on(device, self._upstream.pop((value, microbatch), []))

    def _at(
        self, action: Action, device: str, arrived: Sequence[tf.Tensor], act: Callable[[], list[tf.Tensor]]
    ) -> None:
        """Run an action after the earlier ones of its device and, to be timed, after its transfers have arrived."""
        with tf.device(device), tf.control_dependencies(self._before[device]):
            if not self._timed:
                self._before[device] = act()
                return
            with tf.control_dependencies(arrived):
                begin = tf_function.unordered_timestamp()
            with tf.control_dependencies([begin]):
                done = act()
            with tf.control_dependencies(done):
                end = tf_function.unordered_timestamp()
        self.moments.append(Moment(action, begin, end))
        self._before[device] = [end]

    def _forward(self, action: Action, values: list[MaskedTensor]) -> list[tf.Tensor]:
        _, stage, number = action
        program = self._programs.stages[stage]
        variables = self._variables.read(stage, number)
        factors = self._factors(stage, number)
        scales = self._scale * (tf.stack(factors) if factors else tf.zeros([0], self._scale.dtype))
        place = Place(tf.constant(number, tf.int64), self.microbatches[number].part, self._sums_in_call[stage])
        done = program.forward(values, variables, place, scales)
        self._forwards[stage, number] = done
        self._values[number] |= dict(zip(program.stage.outputs, done.outputs, strict=True))
        self._variables.note(program.states, number, done.new_states, self.microbatches[number])
        self.losses += [
            factor * tf.cast(loss, factor.dtype) for factor, loss in zip(factors, done.losses, strict=False)
        ]
        ends = tensors_of([value.tensor for value in done.outputs])
        if self._loss is not None and stage == len(self._programs.stages) - 1:
            part = self._loss(self, number, self.outputs(number))
            for value, gradient in zip(self._programs.outputs, part.gradients, strict=True):
                if gradient is not None:
                    self._upstream[value, number].append(gradient)
            self.loss_parts.append(part)
            self.losses.append(part.value)
            ends = [part.value, *ends]
        return ends

    def _factors(self, stage: int, number: int) -> list[tf.Tensor]:
        if not self._added_factors:
            return []
        first = sum(program.num_losses for program in self._programs.stages[:stage])
        return list(self._added_factors[number][first : first + self._programs.stages[stage].num_losses])

    def _backward(self, action: Action, upstream: list[tf.Tensor | None]) -> list[tf.Tensor]:
        _, stage, number = action
        program, done = self._programs.stages[stage], self._forwards[stage, number]
        inputs, sums = program.backward(done, upstream, self._gradients[stage])
        for value, gradient in zip(program.stage.inputs, inputs, strict=True):
            if gradient is not None:
                self._upstream[value, number].append(gradient)
        if sums is not None:
            self._gradients[stage] = sums
            del self._forwards[stage, number]
        return tensors_of([inputs, sums]) or [tf.zeros([])]

    def _weights(self, action: Action) -> list[tf.Tensor]:
        _, stage, number = action
        done = self._forwards.pop((stage, number))
        sums = self._programs.stages[stage].weight_gradients(done, self._gradients[stage])
        self._gradients[stage] = sums
        return tensors_of(sums) or [tf.zeros([])]

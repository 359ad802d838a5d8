"""A schedule lowered to one TensorFlow graph: every action a function call on its device, in the device's order.

device 0   F0.0 ─► F0.1 ─────────► B0.0 ─► B0.1       ─►  the order of the device: a control dependency
             └─┐      └─┐          ┌─┘       ┌─┘       ┐  a transfer: TensorFlow sends an activation or a gradient
device 1      F1.0 ─► B1.0 ─► F1.1 ─► B1.1             └  as soon as it is computed, while both devices compute

Actions that repeat with later micro-batches are a loop, so that the graph does not grow with their number. An
iteration begins on each device when the previous one has ended there, not when it has ended everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfpar import data
from tfpar._compat.graphs import tf_function
from tfpar.pipeline.execution.live_tensors import Key
from tfpar.pipeline.execution.microbatches import Microbatch, Microbatches, host_of
from tfpar.pipeline.execution.row_sums import RowSums
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.execution.step_state import StepVariables
from tfpar.pipeline.graph.tracing import Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.segments import Segment, needs_queues
from tfpar.pipeline.stages.bundles import Bundle
from tfpar.pipeline.stages.compiled_stage import BackwardResults
from tfpar.pipeline.stages.compiler import CompiledStages
from tfpar.pipeline.stages.values import MaskedTensor, Place, copies_on, places_of, sum_on
from tfpar.reduction.gradients.gradient_addition import plus, tensors_of


class Execution:
    """One run of a schedule over the micro-batches of one global batch, while a step is traced.

    Args:
        compiled: The compiled stages.
        variables: The weights and states of the step, and the tensors that it holds.
        microbatches: The micro-batches of the batch.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
        factors: Returns for a micro-batch the weight of each added loss in the loss of the batch, in the order of the
            stages; None for a prediction.
        loss: Computes the loss of a micro-batch; None for a prediction. A prediction collects the outputs, and so does
            a loss that takes those of all micro-batches.
        sums_in_call: The sum and weight over the whole batch of each loss computed by a layer, in the order of the
            stages, float64 `[losses, 2]`; None where no loss is computed.
        first_microbatch: The index in the batch of micro-batch 0 of the schedule.
        timed: Whether to measure when each action runs.

    Attributes:
        stages: The compiled passes of each stage.
        moments: Each timed action with its begin and end in seconds of TensorFlow's clock, float64 scalars.
    """

    def __init__(
        self,
        compiled: CompiledStages,
        variables: StepVariables,
        microbatches: Microbatches,
        scale: tf.Tensor,
        factors: Callable[[Microbatch], Sequence[tf.Tensor]] | None = None,
        loss: StepLoss | None = None,
        sums_in_call: tf.Tensor | None = None,
        *,
        first_microbatch: int = 0,
        timed: bool = False,
    ) -> None:
        self.stages, self._outputs, self._specs = compiled.stages, compiled.outputs, compiled.specs
        self.variables, self.live, self.microbatches = variables, variables.live, microbatches
        self._timed, self._added_factors, self._loss, self._first_microbatch = timed, factors, loss, first_microbatch
        self.devices = [compiled.device for compiled in self.stages]
        self._groups = {compiled.device: compiled.devices for compiled in self.stages}
        self._loss_places: list[str] = []
        sizes = [len(compiled.ways) for compiled in self.stages]
        sums = tf.zeros([sum(sizes), 2], tf.float64) if sums_in_call is None else sums_in_call
        # Each device has its own, or a loop would send them in every iteration.
        of_stages = zip(tf.split(sums, sizes), self.devices, strict=True)
        self._sums_in_call = [MaskedTensor(of_stage).on(device).tensor for of_stage, device in of_stages]
        self._scales = [MaskedTensor(scale).on(device).tensor for device in self.devices]
        self._producers = {value: i for i, stage in enumerate(self.stages) for value in stage.stage.computed}
        self._last_uses = self._find_last_uses()
        self._rows = [
            RowSums(self.live, stage, compiled.trace.backward.sums, compiled.kinds, compiled.device)
            for stage, compiled in enumerate(self.stages)
        ]
        self._earlier: dict[str, Sequence[tf.Tensor]] = {}  # the ends before those of the last action, by device
        self._offset: tf.Tensor | None = None
        self._cut: dict[tuple[int, str], Microbatch] = {}
        self.moments: list[tuple[Action, tf.Tensor, tf.Tensor]] = []

    def run(self, segments: Sequence[Segment], others: Sequence[Segment] = ()) -> None:
        """Add the actions of segments to the graph; each action comes after those that it depends on.

        Args:
            segments: The segments.
            others: Those of the same step that run earlier or later.
        """
        self.live.uses_queues = needs_queues([*segments, *others])
        for segment in segments:
            if segment.repeats == 1:
                self._run_each(segment.unrolled())
            else:
                self._run_loop(segment)

    def _run_loop(self, segment: Segment) -> None:
        def act(offset: tf.Tensor) -> None:
            self._offset, self._cut = offset, {}
            self._run_each(segment.actions)
            self._join_ends()

        self._join_ends()
        self.live.repeat(segment.repeats, segment.shift, act, num_parallel=2 * len(self.devices) + 2)
        for device in dict.fromkeys(self.devices):
            with tf.device(device):  # a control dependency on a result of the loop would be one on the whole loop
                self.live[Key("end", device)] = [tf.identity(end) for end in self._before(device)]
        self._offset, self._cut = None, {}

    def _run_each(self, actions: Iterable[Action]) -> None:
        for action in actions:
            _, stage, number = action
            device, compiled = self.devices[stage], self.stages[stage]
            if action.kind == "F":
                values = [self.value(value, number, device) for value in compiled.stage.inputs]
                arrived = tensors_of([value.tensor for value in values])
                self._at(action, device, arrived, functools.partial(self._forward, stage, number, values))
            elif action.kind == "B":
                upstream = self._upstream(stage, number)
                arrived = tensors_of(upstream)
                self._at(action, device, arrived, functools.partial(self._backward, stage, number, upstream))
            else:
                self._at(action, device, [], functools.partial(self._weights, stage, number))

    def microbatch(self, number: int, device: str) -> Microbatch:
        """Return a micro-batch for a stage on a device; in a loop `number` is its index in the first iteration."""
        key = number, host_of(device)
        if key not in self._cut:
            self._cut[key] = self.microbatches.at(functools.partial(self._index, number), key[1])
        return self._cut[key]

    def number(self, number: int, device: str) -> tf.Tensor:
        """Return the index in the global batch of a micro-batch, an int64 scalar on the host of a device."""
        with tf.device(host_of(device)):
            return self._index(number, host_of(device)) + self.microbatches.first_number

    def _index(self, number: int, host: str) -> tf.Tensor:
        """Return the index among the micro-batches of this process."""
        with tf.device(host):
            index = tf.constant(self._first_microbatch + number, tf.int64)
            return index if self._offset is None else index + self._offset

    def outputs(self) -> list[list[MaskedTensor]]:
        """Return the model's collected flat outputs for each micro-batch, on the last stage's device.

        Those of a prediction have no masks, and no rows of a repeated example.
        """
        outputs = [self._specs[value] for value in self._outputs]
        specs = [(spec.whole, None if self._loss is None else spec.mask) for spec in outputs]
        collected = self.live.dequeue_all(Key("outputs", "model"), self.devices[-1], specs)
        return [[MaskedTensor(*pair) for pair in of_microbatch] for of_microbatch in collected]

    def receive(self, number: int, gradients: Sequence[Any]) -> None:
        """Hold the gradient of each output of a micro-batch for the backward pass of the last stage.

        Args:
            number: The index of the micro-batch.
            gradients: A tensor, a tuple of shards, or None for none. A tensor is divided where the output is sharded.
        """
        if tensors_of(gradients):
            divided = list(map(self._as_output, self._outputs, gradients))
            self._loss_places = places_of(self._groups[self.devices[-1]], divided)
            self.live.save(_loss_gradients(number), divided, self._loss_places)

    def _as_output(self, value: Value, gradient: Any) -> Any:
        """Return the gradient of an output, in shards where the output is sharded."""
        spec = self._specs[value]
        if not (spec.is_sharded and isinstance(gradient, tf.Tensor)):
            return gradient
        with tf.device(self.devices[-1]):
            shards = tuple(tf.split(gradient, [shard.shape[-1] for shard in spec.spec], axis=-1))
        return copies_on(self._groups[self.devices[-1]], shards)

    def sums(self) -> list[list[Any]]:
        """Return for each stage the gradients of its weights, summed over micro-batches, as `CompiledStage.sums` does.

        A stage without a backward pass has none.
        """
        sums = []
        for stage, compiled in enumerate(self.stages):
            totals = self.live.take(Key("totals", stage))
            sums.append([] if totals is None else compiled.sums(totals, self._rows[stage].total()))
        return sums

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses added by each stage, summed over micro-batches, scalars."""
        return [self.live[key] for key in self.live.of_role("added losses")]

    @property
    def ends(self) -> list[tf.Tensor]:
        """Tensors of the last action of each device: after them, all actions have run."""
        return [tensor for device in dict.fromkeys(self.devices) for tensor in self._before(device)]

    def _before(self, device: str) -> list[tf.Tensor]:
        before: list[tf.Tensor] = self.live.get(Key("end", device), [])
        return before

    def _join_ends(self) -> None:
        """Replace the ends of each device by one scalar, which a loop carries to its next iteration."""
        for device in dict.fromkeys(self.devices):
            with tf.device(device), tf.control_dependencies(self._before(device)):
                self.live[Key("end", device)] = [tf.constant(True)]

    def _find_last_uses(self) -> dict[tuple[Value, str], int]:
        """Return the last stage of each device that takes a value; the loss takes the outputs after the last stage."""
        uses = {}
        for index, compiled in enumerate(self.stages):
            uses.update({(value, compiled.device): index for value in compiled.stage.inputs})
        return uses | {(value, self.devices[-1]): len(self.devices) - 1 for value in self._outputs}

    def value(self, value: Value, number: int, device: str) -> MaskedTensor:
        """Return a value of a micro-batch on a device; it was sent there once, as soon as it was computed."""
        if value not in self._producers:
            entry = self.microbatch(number, device).values[value, device]
            with tf.device(device):
                return MaskedTensor(tf.nest.map_structure(tf.identity, entry, expand_composites=True))
        return MaskedTensor(*self.live[Key("value", (value, device), number)])

    def _upstream(self, stage: int, number: int) -> list[Any]:
        """Return the summed gradient of each output of a stage; those of the last stage come from the loss."""
        outputs, device = self.stages[stage].stage.outputs, self.devices[stage]
        if stage == len(self.devices) - 1:
            of_loss = self.live.take_saved(_loss_gradients(number), self._loss_places, [])
            pairs = list(zip(self._outputs, of_loss, strict=False))
            per_output = [[gradient for output, gradient in pairs if output is value] for value in outputs]
        else:
            sources = range(len(self.devices) - 1, -1, -1)
            keys = [[Key("gradient", (value, source), number) for source in sources] for value in outputs]
            per_output = [[self.live.take(key) for key in of_value] for of_value in keys]
        return [sum_on(self._groups[device], gradients) for gradients in per_output]

    def _send(self, gradients: Sequence[Any], values: Sequence[Value], source: int, number: int) -> None:
        """Send gradients of values to the devices that computed the values."""
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None and value in self._producers:
                with tf.device(self.devices[self._producers[value]]):
                    sent = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                    key = Key("gradient", (value, source), number)
                    self.live[key] = plus(self.live.get(key), sent)

    def _at(
        self, action: Action, device: str, arrived: Sequence[tf.Tensor], act: Callable[[], list[tf.Tensor]]
    ) -> None:
        """Run an action after the earlier ones of its device and, to be timed, after its transfers have arrived."""
        before = self._before(device)
        with tf.device(device), tf.control_dependencies(before):
            if not self._timed:
                done = act()
            else:
                with tf.control_dependencies(arrived):
                    begin = tf_function.unordered_timestamp()
                with tf.control_dependencies([begin]):
                    done = act()
                with tf.control_dependencies(done):
                    done = [tf_function.unordered_timestamp()]
                self.moments.append((action, begin, *done))
        self.live[Key("end", device)], self._earlier[device] = done, before

    def _forward(self, stage: int, number: int, values: list[MaskedTensor]) -> list[tf.Tensor]:
        compiled, device, scale = self.stages[stage], self.devices[stage], self._scales[stage]
        microbatch = self.microbatch(number, device)
        factors, weights = self._factors(stage, microbatch), self._weights_of(stage)
        scales = scale * (tf.stack(factors) if factors else tf.zeros([0], scale.dtype))
        place = Place(self.number(number, device), microbatch.part, self._sums_in_call[stage])
        states = self.variables.states(stage, number)
        done = compiled.forward(weights, states, values, place, scales, microbatch.rows)
        ends = [*done.saved, *done.new_states, *tensors_of([done.outputs, done.losses])][: compiled.num_ends]
        self._publish(compiled.stage, done.outputs, done.masks, number)
        self.variables.note(stage, number, done.new_states, microbatch)
        if done.saved and compiled.trains:
            self.live.save(Key("saved", stage, number), done.saved, compiled.saved_places[0])
        for factor, loss in zip(factors, done.losses, strict=False):
            self.live.add(Key("added losses", stage), factor * tf.cast(loss, factor.dtype))
        if stage == len(self.devices) - 1:
            ends = [*ends, *self._end_forward(number)]
        for (value, device), last in self._last_uses.items():
            if last == stage:
                self.live.take(Key("value", (value, device), number))
        return ends

    def _end_forward(self, number: int) -> list[tf.Tensor]:
        """Compute the loss of a micro-batch, or collect its outputs."""
        device = self.devices[-1]
        outputs = [self.value(value, number, device) for value in self._outputs]
        ends: list[tf.Tensor] = []
        result = None
        if self._loss is not None:
            index, microbatch = self.number(number, device), self.microbatch(number, device)
            result = self._loss.add(number, index, microbatch, outputs)
        if result is not None:
            self.receive(number, result.gradients)
            ends = [result.value, *tensors_of(result.gradients)][: self.stages[-1].num_ends]
        if self._loss is None or self._loss.takes_outputs:
            collected = map(functools.partial(self._collected, number), self._outputs, outputs)
            self.live.enqueue(Key("outputs", "model"), list(collected), device)
        self.variables.end_forward(number)
        return ends

    def _collected(self, number: int, value: Value, output: MaskedTensor) -> tuple[Any, tf.Tensor | None]:
        whole = output.whole(*self._groups[self.devices[-1]])
        if self._loss is None:
            return self._counted_rows(number, whole), None
        return whole, None if self._specs[value].mask is None else output.mask

    def _counted_rows(self, number: int, output: Any) -> Any:
        """Return the rows of an output, any number for each example; none of a repeated example."""
        with tf.device(self.devices[-1]):
            num_rows = data.num_rows(output)
        with tf.device(host_of(self.devices[-1])):
            last = tf.where(self.microbatch(number, self.devices[-1]).num_counted > 0, num_rows, 0)
        return data.take_rows(output, 0, last)

    def _publish(self, stage: Stage, tensors: Sequence[Any], masks: Sequence[Any], number: int) -> None:
        """Send the outputs that a stage computes to the devices of later stages."""
        for value, tensor, mask in zip(stage.outputs, tensors, masks, strict=True):
            for device in dict.fromkeys(self.devices):
                if value in stage.computed and (value, device) in self._last_uses:
                    sent = MaskedTensor(tensor, mask).on(*self._groups[device])
                    self.live[Key("value", (value, device), number)] = sent.tensor, sent.mask

    def _factors(self, stage: int, microbatch: Microbatch) -> list[tf.Tensor]:
        if self._added_factors is None:
            return []
        counts = [compiled.num_losses for compiled in self.stages]
        first = sum(counts[:stage])
        return list(self._added_factors(microbatch)[first : first + counts[stage]])

    def _backward(self, stage: int, number: int, upstream: list[tf.Tensor | None]) -> list[tf.Tensor]:
        compiled, key, weights = self.stages[stage], Key("totals", stage), self._weights_of(stage)
        saved = self.live.take_saved(Key("saved", stage, number), compiled.saved_places[0], [])
        totals = None if compiled.splits_backward else self.live.get(key)
        done = compiled.backward(weights, saved, upstream, totals, self.microbatch(number, compiled.device).rows)
        self._send(done.input_gradients, compiled.stage.inputs, stage, number)
        if compiled.splits_backward:
            self.live.save(Key("saved for W", stage, number), done.saved, compiled.saved_places[1])
        else:
            self._note_gradients(stage, done)
        return tensors_of(done)[: compiled.num_ends] or [tf.zeros([])]

    def _weights_of(self, stage: int) -> Bundle:
        """Return the weights of a stage; sharded ones are on their way during the action before."""
        return self.variables.weights(stage, self._earlier.get(self.devices[stage], ()))

    def _weights(self, stage: int, number: int) -> list[tf.Tensor]:
        compiled = self.stages[stage]
        saved = self.live.take_saved(Key("saved for W", stage, number), compiled.saved_places[1], [])
        done = compiled.weight_gradients(self._weights_of(stage), saved, self.live.get(Key("totals", stage)))
        self._note_gradients(stage, done)
        return tensors_of(done)[: compiled.num_ends] or [tf.zeros([])]

    def _note_gradients(self, stage: int, done: BackwardResults) -> None:
        self.live[Key("totals", stage)] = done.totals
        self._rows[stage].add(done.rows)


def _loss_gradients(number: int) -> Key:
    """Return the key of the gradients of the model's outputs."""
    return Key("gradients of the loss", "model", number)

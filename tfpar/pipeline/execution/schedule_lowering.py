"""Lowering of a schedule to one TensorFlow graph. Each action is a function call on its device, in the device's order.

device 0   F0.0 ─► F0.1 ─────────► B0.0 ─► B0.1       ─►  the order of the device: a control dependency
             └─┐      └─┐          ┌─┘       ┌─┘       ┐  a transfer: TensorFlow sends an activation or a gradient
device 1      F1.0 ─► B1.0 ─► F1.1 ─► B1.1             └  as soon as it is computed, while both devices compute

Actions that repeat with later micro-batches become a loop, so that the graph does not grow with their number. An
iteration starts on each device as soon as the previous one has ended on this device.
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
from tfpar.pipeline.stages.values import BatchPosition, MaskedTensor, copies_on, sum_on, value_devices
from tfpar.reduction.gradients.gradient_addition import plus, tensors_of


class Execution:
    """The execution of a schedule on the micro-batches of one global batch, while a step is traced.

    Args:
        compiled: The compiled stages.
        variables: The weights, states and live tensors of the step.
        microbatches: The micro-batches of the batch.
        scale: The gradient with respect to the loss, a scalar in Keras' float type.
        factors: Returns the weight of each added loss of a micro-batch in the loss of the batch, in the order of the
            stages; None for a prediction.
        loss: The loss; None for a prediction. Predictions, and losses of the whole batch, collect the outputs.
        sums_in_call: The sum and weight over the whole batch of each loss that layers compute, in the order of the
            stages, float64 `[losses, 2]`; None if there are none.
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
        self._gradient_devices: list[str] = []
        sizes = [len(compiled.ways) for compiled in self.stages]
        sums = tf.zeros([sum(sizes), 2], tf.float64) if sums_in_call is None else sums_in_call
        # Copied to each device once, because a loop would send them in every iteration.
        stage_sums = zip(tf.split(sums, sizes), self.devices, strict=True)
        self._sums_in_call = [copies_on([device], tensor) for tensor, device in stage_sums]
        self._scales = [copies_on([device], scale) for device in self.devices]
        self._producers = {value: i for i, stage in enumerate(self.stages) for value in stage.stage.computed}
        self._last_uses = self._find_last_uses()
        self._rows = [
            RowSums(self.live, stage, compiled.trace.backward.sums, compiled.kinds, compiled.device)
            for stage, compiled in enumerate(self.stages)
        ]
        self._earlier: dict[str, Sequence[tf.Tensor]] = {}  # by device, the ends of the action before the last
        self._offset: tf.Tensor | None = None
        self._cut: dict[tuple[int, str], Microbatch] = {}
        self.moments: list[tuple[Action, tf.Tensor, tf.Tensor]] = []

    def run(self, segments: Sequence[Segment], others: Sequence[Segment] = ()) -> None:
        """Add the actions of segments to the graph.

        Args:
            segments: The segments, in topological order.
            others: Other segments of the same step, which run earlier or later.
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
            with tf.device(device):  # a control dependency on a result of the loop would wait for the whole loop
                self.live[Key("end", device)] = [tf.identity(end) for end in self._before(device)]
        self._offset, self._cut = None, {}

    def _run_each(self, actions: Iterable[Action]) -> None:
        for action in actions:
            _, stage, number = action
            device, compiled = self.devices[stage], self.stages[stage]
            if action.kind == "F":
                values = [self.value(value, number, device) for value in compiled.stage.inputs]
                arrived = tensors_of([value.tensor for value in values])
                self._run_action(action, device, arrived, functools.partial(self._forward, stage, number, values))
            elif action.kind == "B":
                upstream = self._upstream(stage, number)
                arrived = tensors_of(upstream)
                self._run_action(action, device, arrived, functools.partial(self._backward, stage, number, upstream))
            else:
                self._run_action(action, device, [], functools.partial(self._weight_gradients, stage, number))

    def microbatch(self, number: int, device: str) -> Microbatch:
        """Return a micro-batch for a stage on a device; in a loop, `number` is its index in the first iteration."""
        key = number, host_of(device)
        if key not in self._cut:
            self._cut[key] = self.microbatches.at(functools.partial(self._index, number), key[1])
        return self._cut[key]

    def number(self, number: int, device: str) -> tf.Tensor:
        """Return the index of a micro-batch in the global batch, an int64 scalar on the host of a device."""
        with tf.device(host_of(device)):
            return self._index(number, host_of(device)) + self.microbatches.first_number

    def _index(self, number: int, host: str) -> tf.Tensor:
        """Return the index of a micro-batch among those of this process."""
        with tf.device(host):
            index = tf.constant(self._first_microbatch + number, tf.int64)
            return index if self._offset is None else index + self._offset

    def outputs(self) -> list[list[MaskedTensor]]:
        """Return the collected flat outputs of the model for each micro-batch, on the last device.

        In a prediction they have no masks, and repeated examples are dropped.
        """
        outputs = [self._specs[value] for value in self._outputs]
        specs = [(spec.whole, None if self._loss is None else spec.mask) for spec in outputs]
        collected = self.live.dequeue_all(Key("outputs", "model"), self.devices[-1], specs)
        return [[MaskedTensor(*pair) for pair in microbatch] for microbatch in collected]

    def save_output_gradients(self, number: int, gradients: Sequence[Any]) -> None:
        """Save the gradient of each output of a micro-batch for the backward pass of the last stage.

        Args:
            number: The index of the micro-batch.
            gradients: Each a tensor, a tuple of shards, or None. The gradient of a sharded output is split into shards.
        """
        if tensors_of(gradients):
            split = list(map(self._split_gradient, self._outputs, gradients))
            self._gradient_devices = value_devices(self._groups[self.devices[-1]], split)
            self.live.save(_loss_gradients(number), split, self._gradient_devices)

    def _split_gradient(self, value: Value, gradient: Any) -> Any:
        spec = self._specs[value]
        if not (spec.is_sharded and isinstance(gradient, tf.Tensor)):
            return gradient
        with tf.device(self.devices[-1]):
            shards = tuple(tf.split(gradient, [shard.shape[-1] for shard in spec.spec], axis=-1))
        return copies_on(self._groups[self.devices[-1]], shards)

    def sums(self) -> list[list[Any]]:
        """Return the weight gradients of each stage, summed over micro-batches; empty without a backward pass."""
        sums = []
        for stage, compiled in enumerate(self.stages):
            totals = self.live.take(Key("totals", stage))
            sums.append([] if totals is None else compiled.sums(totals, self._rows[stage].total()))
        return sums

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses added by each stage, summed over micro-batches, scalars."""
        return [self.live[key] for key in self.live.keys("added losses")]

    @property
    def ends(self) -> list[tf.Tensor]:
        """Results of the last action of each device, to wait for until all actions have run."""
        return [tensor for device in dict.fromkeys(self.devices) for tensor in self._before(device)]

    def _before(self, device: str) -> list[tf.Tensor]:
        before: list[tf.Tensor] = self.live.get(Key("end", device), [])
        return before

    def _join_ends(self) -> None:
        """Replace the ends of each device by one scalar that a loop can carry."""
        for device in dict.fromkeys(self.devices):
            with tf.device(device), tf.control_dependencies(self._before(device)):
                self.live[Key("end", device)] = [tf.constant(True)]

    def _find_last_uses(self) -> dict[tuple[Value, str], int]:
        """Return the last stage that reads each value on each device. The loss reads outputs after the last stage."""
        uses = {}
        for index, compiled in enumerate(self.stages):
            uses.update({(value, compiled.device): index for value in compiled.stage.inputs})
        return uses | {(value, self.devices[-1]): len(self.devices) - 1 for value in self._outputs}

    def value(self, value: Value, number: int, device: str) -> MaskedTensor:
        """Return a value of a micro-batch on a device."""
        if value not in self._producers:
            model_input = self.microbatch(number, device).values[value, device]
            with tf.device(device):
                return MaskedTensor(tf.nest.map_structure(tf.identity, model_input, expand_composites=True))
        return MaskedTensor(*self.live[Key("value", (value, device), number)])

    def _upstream(self, stage: int, number: int) -> list[Any]:
        """Return the summed gradient of each output of a stage. Those of the last stage come from the loss."""
        outputs, device = self.stages[stage].stage.outputs, self.devices[stage]
        if stage == len(self.devices) - 1:
            loss_gradients = self.live.take_saved(_loss_gradients(number), self._gradient_devices, [])
            pairs = list(zip(self._outputs, loss_gradients, strict=False))
            per_output = [[gradient for output, gradient in pairs if output is value] for value in outputs]
        else:
            sources = range(len(self.devices) - 1, -1, -1)
            keys = [[Key("gradient", (value, source), number) for source in sources] for value in outputs]
            per_output = [list(map(self.live.take, value_keys)) for value_keys in keys]
        return [sum_on(self._groups[device], gradients) for gradients in per_output]

    def _send_gradients(self, gradients: Sequence[Any], values: Sequence[Value], source: int, number: int) -> None:
        """Send gradients of values to the devices that computed the values."""
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None and value in self._producers:
                with tf.device(self.devices[self._producers[value]]):
                    sent = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                    key = Key("gradient", (value, source), number)
                    self.live[key] = plus(self.live.get(key), sent)

    def _run_action(
        self, action: Action, device: str, arrived: Sequence[tf.Tensor], act: Callable[[], list[tf.Tensor]]
    ) -> None:
        """Run an action after the earlier actions of its device. If it is timed, wait also for its transfers."""
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
        factors, weights = self._factors(stage, microbatch), self._weights(stage)
        scales = scale * (tf.stack(factors) if factors else tf.zeros([0], scale.dtype))
        position = BatchPosition(self.number(number, device), microbatch.fraction, self._sums_in_call[stage])
        states = self.variables.states(stage, number)
        results = compiled.forward(weights, states, values, position, scales, microbatch.rows)
        tensors = [*results.saved, *results.new_states, *tensors_of([results.outputs, results.losses])]
        ends = tensors[: compiled.num_ends]
        self._send_outputs(compiled.stage, results.outputs, results.masks, number)
        self.variables.record(stage, number, results.new_states, microbatch)
        if results.saved and compiled.trains:
            self.live.save(Key("saved", stage, number), results.saved, compiled.saved_devices[0])
        for factor, loss in zip(factors, results.losses, strict=False):
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
            self.save_output_gradients(number, result.gradients)
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
        """Return the rows of an output, however many there are for each example; none for a repeated example."""
        with tf.device(self.devices[-1]):
            num_rows = data.num_rows(output)
        with tf.device(host_of(self.devices[-1])):
            last = tf.where(self.microbatch(number, self.devices[-1]).num_counted > 0, num_rows, 0)
        return data.take_rows(output, 0, last)

    def _send_outputs(self, stage: Stage, tensors: Sequence[Any], masks: Sequence[Any], number: int) -> None:
        """Send the outputs that a stage computes to the devices that read them."""
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
        compiled, key, weights = self.stages[stage], Key("totals", stage), self._weights(stage)
        saved = self.live.take_saved(Key("saved", stage, number), compiled.saved_devices[0], [])
        totals = None if compiled.splits_backward else self.live.get(key)
        results = compiled.backward(weights, saved, upstream, totals, self.microbatch(number, compiled.device).rows)
        self._send_gradients(results.input_gradients, compiled.stage.inputs, stage, number)
        if compiled.splits_backward:
            self.live.save(Key("saved for W", stage, number), results.saved, compiled.saved_devices[1])
        else:
            self._add_weight_gradients(stage, results)
        return tensors_of(results)[: compiled.num_ends] or [tf.zeros([])]

    def _weights(self, stage: int) -> Bundle:
        """Return the weights of a stage. Sharded weights are gathered during the action before."""
        return self.variables.weights(stage, self._earlier.get(self.devices[stage], ()))

    def _weight_gradients(self, stage: int, number: int) -> list[tf.Tensor]:
        compiled = self.stages[stage]
        saved = self.live.take_saved(Key("saved for W", stage, number), compiled.saved_devices[1], [])
        results = compiled.weight_gradients(self._weights(stage), saved, self.live.get(Key("totals", stage)))
        self._add_weight_gradients(stage, results)
        return tensors_of(results)[: compiled.num_ends] or [tf.zeros([])]

    def _add_weight_gradients(self, stage: int, results: BackwardResults) -> None:
        self.live[Key("totals", stage)] = results.totals
        self._rows[stage].add(results.rows)


def _loss_gradients(number: int) -> Key:
    return Key("gradients of the loss", "model", number)

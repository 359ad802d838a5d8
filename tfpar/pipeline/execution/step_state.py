"""The weights and states of all stages in one step, and their new values."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.state_changes import Change, StateChanges
from tfpar.pipeline.stages.bundles import Bundle, unbundle
from tfpar.pipeline.stages.compiled_stage import CompiledStage

LOSS = "loss"
Owner = int | str  # the index of a stage, or LOSS


class StepVariables:
    """The weights and states of all stages in one step.

    Weights and states (moving averages, random seeds) are read once: each micro-batch starts with the values before the
    step. Sharded weights are read for each action. If several stages use a layer, its state passes from one to the
    next.

    Args:
        stages: The compiled stages.
        loss_states: The states that the loss reads and changes.
        loss_parameters: The weights that the loss reads.

    Attributes:
        live: The live tensors of the step.
        last_reads: The last reads of the sharded weights of each stage, by its index.
    """

    def __init__(
        self,
        stages: Sequence[CompiledStage],
        loss_states: Sequence[keras.Variable] = (),
        loss_parameters: Sequence[keras.Variable] = (),
    ) -> None:
        self._stages, self._loss_states = stages, loss_states
        self.live = LiveTensors()
        self._read: dict[int, tf.Tensor] = {}
        self.last_reads: dict[int, list[tf.Operation]] = {}
        self._loss_device = stages[-1].device
        self._weights = {
            index: stage.bundle_parameters(self._values(stage.parameters, stage.parameter_devices))
            for index, stage in enumerate(stages)
            if not stage.shards_weights
        }
        self._states = [
            stage.bundle(self._values(stage.states, [stage.device] * len(stage.states))) for stage in stages
        ]
        self.loss_parameters = self._values(loss_parameters, [self._loss_device] * len(loss_parameters))
        self._loss_values = self._values(loss_states, [self._loss_device] * len(loss_states))
        self._changes = self._find_changes()
        users = collections.Counter(id(state) for stage in stages for state in stage.states)
        users.update(map(id, loss_states))
        self._shared = {key for key, count in users.items() if count > 1}

    def weights(self, stage: int, after: Sequence[tf.Tensor] = ()) -> Bundle:
        """Return the values of the weights of a stage on its device.

        Args:
            stage: Index of the stage.
            after: Tensors to compute before sharded weights are gathered.
        """
        if stage in self._weights:
            return self._weights[stage]
        compiled, reads = self._stages[stage], list[tf.Tensor]()
        with tf.control_dependencies(None), tf.control_dependencies(after):
            for weight in compiled.parameters:
                with tf.device(weight.value.device):  # a separate read, because TensorFlow may merge copies of one
                    reads.append(tf.raw_ops.ReadVariableOp(resource=weight.value.handle, dtype=weight.value.dtype))
            with tf.device(compiled.device):
                copies = compiled.bundle_parameters(list(map(tf.identity, reads)))
        self.last_reads[stage] = [value.op for value in reads if not tf.executing_eagerly()]
        return copies

    def states(self, stage: int, number: int) -> Bundle:
        """Return the values of a stage's states for a micro-batch."""
        compiled = self._stages[stage]
        if not any(Key("state", id(state), number) in self.live for state in compiled.states):
            return self._states[stage]
        before = unbundle(self._states[stage], compiled.state_specs, compiled.device)
        return compiled.bundle(self._now(compiled.states, before, number, compiled.device))

    def loss_states(self, number: int) -> list[tf.Tensor]:
        """Return the values of the states that the loss reads in a micro-batch, after the last stage."""
        return self._now(self._loss_states, self._loss_values, number, self._loss_device)

    def record(self, stage: int, number: int, new: Bundle, microbatch: Microbatch) -> None:
        """Record the new values of the states that a stage changes in a micro-batch."""
        compiled = self._stages[stage]
        if any(id(state) in self._shared for state in compiled.changed_states):
            specs = [tf.TensorSpec(state.shape, state.dtype) for state in compiled.changed_states]
            self._share(compiled.changed_states, unbundle(new, specs, compiled.device), number)
        if stage in self._changes:
            self._changes[stage].add(self.live, new, microbatch)

    def record_loss(self, number: int, new: Sequence[tf.Tensor], microbatch: Microbatch) -> None:
        """Record the new values of the states that the loss changes in a micro-batch."""
        if LOSS in self._changes:
            self._changes[LOSS].add(self.live, self._stages[-1].bundle(new), microbatch)

    def end_forward(self, number: int) -> None:
        """Remove the states of a micro-batch after its forward pass and loss."""
        for key in self.live.keys("state"):
            if key.microbatch == number:
                self.live.take(key)

    def changes(self) -> list[Change]:
        """Return the changes of states, after the last action of the step."""
        return [change for changes in self._changes.values() for change in changes.results(self.live)]

    def _values(self, variables: Sequence[keras.Variable], devices: Sequence[str]) -> list[tf.Tensor]:
        """Return the value of each variable before the step, on the given device."""
        values = []
        for variable, device in zip(variables, devices, strict=True):
            if id(variable) not in self._read:
                with tf.control_dependencies(None), tf.device(variable.value.device):
                    self._read[id(variable)] = variable.value.read_value()
            with tf.device(device):
                values.append(tf.identity(self._read[id(variable)]))
        return values

    def _now(self, states: Sequence[Any], before: Sequence[tf.Tensor], number: int, device: str) -> list[tf.Tensor]:
        """Return the values of states in a micro-batch, including changes by earlier stages."""
        with tf.device(device):
            return [
                tf.identity(self.live.get(Key("state", id(state), number), value))
                for state, value in zip(states, before, strict=True)
            ]

    def _share(self, states: Sequence[Any], values: Sequence[tf.Tensor], number: int) -> None:
        for state, value in zip(states, values, strict=True):
            if id(state) in self._shared:
                self.live[Key("state", id(state), number)] = value

    def _find_changes(self) -> dict[Owner, StateChanges]:
        """Assign each state to the stage that is the last to change it in a micro-batch."""
        changed: dict[Owner, Sequence[Any]] = {i: stage.changed_states for i, stage in enumerate(self._stages)}
        changed[LOSS] = self._loss_states
        last = {id(state): owner for owner, states in changed.items() for state in states}
        counting = {key for stage in self._stages for key in stage.metric_states}
        changes: dict[Owner, StateChanges] = {}
        for owner, states in changed.items():
            owned = [state for state in states if last[id(state)] == owner]
            if owned:
                device = self._loss_device if isinstance(owner, str) else self._stages[owner].device
                before = [self._read[id(state)] for state in owned]
                changes[owner] = StateChanges(owner, states, owned, before, counting, device)
        return changes

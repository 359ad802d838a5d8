"""Tensor parallelism: each layer divided over several devices, which compute it together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import cluster, data
from tfpar._compat import (
    keras_divided_optimizer,
    keras_divided_penalties,
    keras_model,
    keras_variables,
    keras_weight_placement,
    random_state,
)
from tfpar.cluster import tf_config
from tfpar.layout import Layout
from tfpar.messages import keyword_arguments
from tfpar.per_model import PerModel
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.placement.devices import follow_data
from tfpar.reduction import gathered_classes, objective
from tfpar.reduction.update_order import after_reads
from tfpar.strategies.batches_ahead import HOST, StepBatch
from tfpar.strategies.model_version import ModelVersion
from tfpar.strategies.preview import Preview
from tfpar.strategies.single_device import update_metrics
from tfpar.strategies.single_replica import SingleReplica
from tfpar.strategies.tensor_parallel import updates
from tfpar.strategies.tensor_parallel.replicas import check_examples_apart
from tfpar.strategies.tensor_parallel.rules import check_rules
from tfpar.strategies.tensor_parallel.runner import DividedModel
from tfpar.strategies.tensor_parallel.table import preview_of, warn_of_nothing, warn_of_whole
from tfpar.strategies.tensor_parallel.table_copies import TableCopies
from tfpar.strategies.tensor_parallel.ways import layout_of
from tfpar.strategies.tensor_parallel.wide_inputs import CutInputs, cut_inputs, cut_sizes, sent_inputs


class _State(NamedTuple):
    """What the layout of a model depends on, besides its shapes: LoRA, for one, is enabled before another `compile`."""

    version: ModelVersion
    absent: tuple[int, ...]  # optional inputs

    @classmethod
    def of(cls, model: keras.Model, inputs: Any) -> _State:
        return cls(ModelVersion(model, counts_variables=True, with_settings=False), _absent(inputs))

    def is_of(self, model: keras.Model, inputs: Any) -> bool:
        return (inputs is None or _absent(inputs) == self.absent) and self.version.is_current(model)


def _absent(inputs: Any) -> tuple[int, ...]:
    leaves = [] if inputs is None else keras.tree.flatten(inputs)
    return tuple(number for number, leaf in enumerate(leaves) if leaf is None)


class TensorParallel(SingleReplica):
    """Train a model whose layers are divided over several devices of this machine, equal to one device.

        x ─┬─► x · A[:, :half] ─► gelu ─► · B[:half, :] ─┐        device 0
           └─► x · A[:, half:] ─► gelu ─► · B[half:, :] ─┴─ sum   device 1

    Each device holds a piece of the large weights, with its gradient and its optimizer state, and computes its part of
    the layer for the whole batch. Dense and EinsumDense layers are divided in pairs, the first by columns and the next
    by rows, with one sum of activations a pair; attention by heads, an Embedding by rows of its table, convolutions by
    filters and then by input channels. All other layers run once, on the first device. Random draws, states and losses
    are those of one device. A divided weight remains one variable in `model.weights`, checkpoints and saved files.

    Args:
        num_shards: Number of devices that a layer is divided over, at least 2. Sizes that it does not divide give
            pieces that differ by one.
        layout: Rules for the weights to divide, in the manner of Keras' `LayoutMap`: regular expressions that are
            searched in the paths of weights, each with a tuple that has `"model"` at the divided axis and None at
            the others. None divides every layer with at least a thousandth of the bytes or multiplications of the
            model where it can, and smaller ones whose input is in pieces.
        devices: Device names such as `["GPU:0", "GPU:1"]`; None takes the first devices of this machine.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a device does not exist, their number is not `num_shards`, or a rule is malformed.

    Example:
        >>> tfpar.use_logical_cpus(4)
        >>> strategy = tfpar.TensorParallel(num_shards=4)
        >>> trainer = tfpar.Trainer(build_model, strategy)
    """

    compiles_with_xla = False

    @keyword_arguments.named
    def __init__(
        self,
        num_shards: int,
        layout: Mapping[str, Sequence[str | None]] | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(num_shards, int) or isinstance(num_shards, bool) or num_shards < 2:
            raise ValueError(
                f"num_shards must be a whole number of at least 2, received {num_shards!r}. On one device, use "
                "SingleDevice()."
            )
        self.num_shards, self.rules, self.given_devices = num_shards, check_rules(layout), devices
        self.layout = Layout(num_shards=num_shards)
        self._take(devices_of(num_shards, 1, devices))
        self._divided: PerModel[DividedModel] = PerModel()
        self._known: PerModel[_State] = PerModel()

    def _take(self, devices: Sequence[str]) -> None:
        """Set the devices, those of the first replica first."""
        self.devices, self.num_replicas = list(devices), len(devices) // self.num_shards

    @property
    def _replicas(self) -> list[list[str]]:
        """The devices of the shards of each replica."""
        names = [f"/device:{name}" for name in self.devices]
        return [names[first : first + self.num_shards] for first in range(0, len(names), self.num_shards)]

    @property
    def _owners(self) -> list[list[str]]:
        """The devices of the shards of each replica that owns weights: the first."""
        return self._replicas[:1]

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model is created; its large weights are allocated in pieces."""
        stack = contextlib.ExitStack()
        stack.enter_context(tf.device(self.devices[0]))
        stack.enter_context(keras_weight_placement.deferred_weights())
        return stack

    def describe(self) -> str:
        """Return one line with the devices."""
        return f"TensorParallel of {self.num_shards} shards on {', '.join(self.device_names)}"

    @property
    def step_device(self) -> str:
        """The first device: it runs all that is not divided."""
        return self.device_names[0]

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is plain or in pieces."""
        return keras_variables.home_of(variable) is None

    def move_model(self, model: keras.Model) -> None:
        """Move the variables of a model to this strategy, and divide its weights if their shapes are known.

        Raises:
            ValueError: If the model has objectives, a rule does not fit it, or it has variables that are no Keras
                variables.
        """
        super().move_model(model)
        if objective.objectives_of(model):
            raise ValueError(
                f"TensorParallel trains with the loss of compile, and {type(model).__name__} has objectives. Train it "
                "with SingleDevice, Mirrored or MultiWorker."
            )
        if model.built and getattr(model, "inputs", None):
            self._divide(model, None)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Choose the layout of the model with its first batch, and place the pieces of its weights.

        Raises:
            ValueError: If the layers of the model cannot be found, a rule does not fit, or the optimizer needs whole
                weights.
        """
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._divide(model, inputs)
        if training and self._divided[model].layout.weights:
            updates.check_optimizer(model)
            updates.place_slots(model)

    def _divide(self, model: keras.Model, inputs: Any) -> None:
        known = self._known.get(model)
        if known is not None and known.is_of(model, inputs):
            return
        with random_state.stand_in_generator():
            graph = model_graph.trace(model, inputs, opens_blocks=True, symbolic_sizes=True)
        layout = layout_of(model, graph, self.num_shards, self.rules)
        if not layout.weights:
            warn_of_nothing(model, layout.whole)
        elif self.rules is None:
            warn_of_whole(model, graph.calls, layout.weights, layout.whole)
        owners = [list(map(keras_variables.full_name, devices)) for devices in self._owners]
        updates.place(model, layout.weights, updates.homes_of(model, layout, owners))
        self._divided[model] = DividedModel(model, graph, layout, self._replicas)
        self._known[model] = _State.of(model, inputs)  # after a move

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the slots of divided weights are created in pieces."""
        return keras_divided_optimizer.creating_divided_slots()

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Check that the parts of a batch have the outputs of the whole batch, with several replicas.

        Raises:
            ValueError: If a layer uses the whole batch.
        """
        if self.num_replicas > 1:
            with random_state.stand_in_generator(), tf.device(self.devices[0]):
                check_examples_apart(model, batch, kind == "train")

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return the bytes of each device, and the divided and whole layers."""
        return preview_of(self.describe(), self._divided[model], int(data.num_rows(batch)), self.device_names)

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch, for the first device but for the columns of wide inputs."""
        inputs, *others = element if isinstance(element, tuple) else (element,)
        own = any(keras_model.overridden(model, method) for method in ("compute_loss", "compute_metrics"))
        cut = None if own else self._cut(model, inputs)
        if cut is None:
            return StepBatch(element, self.device_names[:1] * len(tf.nest.flatten(element)))
        whole, readers = cut
        return StepBatch((whole, *others), [*readers, *self.device_names[:1] * len(tf.nest.flatten(others))])

    def _cut(self, model: keras.Model, inputs: Any) -> tuple[CutInputs, list[str]] | None:
        """Return wide inputs in columns on the host, and the device of each flat tensor; None where none is wide."""
        divided = self._divided[model]
        cuts = cut_sizes(divided.graph, divided.layout) if self.num_replicas == 1 else {}
        if not cuts:
            return None
        with tf.device(HOST):
            values = model_graph.standardize(model, inputs)
        return cut_inputs(divided.graph, cuts, values, self.device_names)

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on a batch; return the loss, a scalar."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape, gathered_classes.read_in_pieces():
            copies = self._copies(model, tape)
            loss, outputs = self._forward(model, batch, training=True, copies=copies)
            with tf.device(self.devices[0]):
                scaled = model.optimizer.scale_loss(loss)
        reads = loss, gathered_classes.tensors_in_pieces(outputs)
        found = updates.gradients(tape, scaled, model, copies)
        with follow_data():  # each gradient stays on the device of its piece
            after = after_reads(found, reads, keras_model.recomputes(model))
        if after:  # else no weight is trained; without any gradient, the optimizer raises
            updates.apply(model, after)
        with tf.device(self.devices[0]), gathered_classes.read_in_pieces():
            update_metrics(model, loss, data.num_rows(inputs), inputs, targets, outputs, weights)
        return loss

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from a batch; return the loss, a scalar."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with gathered_classes.read_in_pieces():
            loss, outputs = self._forward(model, batch, training=False)
        with tf.device(self.devices[0]), gathered_classes.read_in_pieces():
            update_metrics(model, loss, data.num_rows(inputs), inputs, targets, outputs, weights)
        return loss

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each."""
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._check_unchanged(model)
        cut = self._cut(model, inputs)
        return self._divided[model].call(inputs if cut is None else sent_inputs(*cut), training=False)

    def _check_unchanged(self, model: keras.Model) -> None:
        self._known[model].version.check_regularizers(model)
        model_graph.check_unchanged(model, self._divided[model].graph)

    def _copies(self, model: keras.Model, tape: tf.GradientTape) -> TableCopies | None:
        """Return what copies the tables in a step; None without replicas."""
        return None

    def _forward(
        self, model: keras.Model, batch: Any, *, training: bool, copies: TableCopies | None = None
    ) -> tuple[tf.Tensor, Any]:
        """Return the loss, a scalar, and the outputs, `[batch, ...]` each."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        self._check_unchanged(model)
        outputs = self._divided[model].call(inputs, training, copies)
        with tf.device(self.devices[0]), keras_divided_penalties.of_pieces():
            return keras_model.compute_loss(model, inputs, targets, outputs, weights, training), outputs

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average, if the optimizer has one."""
        updates.finalize(model)


def devices_of(num_shards: int, num_replicas: int, devices: Sequence[str] | None) -> list[str]:
    """Return the devices of all replicas.

    Args:
        num_shards: The number of shards.
        num_replicas: The number of replicas.
        devices: Names of devices; None for the first ones of this machine.

    Raises:
        ValueError: If there are others, or too few.
    """
    # The workers of a job connect before TensorFlow starts, in Hybrid, which takes these shards.
    resolve = cluster.configured_devices if tf_config.has_other_workers(os.environ) else cluster.resolve_devices
    found, number = resolve(devices), num_shards * num_replicas
    replicas = f" x num_replicas={num_replicas}" * (num_replicas > 1)
    if devices is not None and len(found) != number:
        raise ValueError(
            f"TensorParallel needs one device for each shard, received num_shards={num_shards}{replicas} and "
            f"{len(found)} devices: {found}. Name {number} devices."
        )
    if len(found) < number:
        raise ValueError(
            f"num_shards={num_shards}{replicas} needs {number} devices, and there are {len(found)}: {found}. Use fewer "
            f"shards.{cluster.more_devices(number, found)}"
        )
    return found[:number]

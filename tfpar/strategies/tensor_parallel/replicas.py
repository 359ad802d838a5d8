"""Replicas of the devices of a tensor-parallel model, each with a part of every global batch.

    replica 0   examples 0 1 2   devices 0 1 ─► outputs ─┐
                                                         ├─► loss and metrics of the whole batch, on device 0
    replica 1   examples 3 4 5   devices 2 3 ─► outputs ─┘

The loss is computed from the outputs of all replicas, as one device computes it. Weights belong to the first replica,
or with `shard="optimizer"` each divided weight to one of the replicas; the others copy them at the beginning of a step.
TensorFlow adds their gradients, but for those of tables (`table_copies`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import (
    keras_model,
    keras_probabilities,
    keras_variables,
    random_state,
    tf_divided_memory,
    tf_tapes,
)
from tfpar.reduction import gathered_classes
from tfpar.reduction.vocabulary_losses import ClassPieces
from tfpar.strategies.tensor_parallel.pieces import sent
from tfpar.strategies.tensor_parallel.table_copies import TableCopies
from tfpar.study.known_layers import normalizing
from tfpar.study.observation import Mode
from tfpar.study.outputs import Words, study_outputs

_SEED = "seed_generator_state"  # the name that Keras gives to the states of its generators


_ALONE = "use TensorParallel without replicas"
_WORDS = Words(alone=_ALONE, mixing=_ALONE)


def check_examples_apart(model: keras.Model, batch: Any, training: bool) -> None:
    """Refuse layers whose output for one example depends on the others of its batch.

    Args:
        model: A built model.
        batch: Its first batch.
        training: Whether to check it in training or in inference.

    Raises:
        ValueError: If there is one, or an output has the examples not as its first axis.
    """
    study_outputs(model, batch, Mode(training, gathers=False), _WORDS, is_known=True)
    if names := normalizing(model, training):
        raise ValueError(
            "Replicas compute parts of a batch, so every layer must compute each example separately, received "
            f"{', '.join(map(repr, names))}{'' if training else ' in inference'}, which uses the whole batch. Use "
            "TensorParallel without replicas."
        )


@contextlib.contextmanager
def discarding_changes(
    model: keras.Model, replica: int, homes: Sequence[str], copies: TableCopies | None
) -> Iterator[None]:
    """Run a replica after the first inside this context: its random draws differ, and changes of seeds are discarded.

    It has copies of the weights of grouped convolutions on its first device: Keras compiles these with XLA on a CPU,
    which reads weights of its own device only.

    Args:
        model: The model.
        replica: The number of the replica.
        homes: The first device of each replica.
        copies: Copies tables in training.

    Raises:
        ValueError: If a layer adds a loss, or changes a state other than a seed.
    """
    grouped = [layer for layer in keras_model.all_layers(model) if getattr(layer, "groups", 1) != 1]
    copied = [weight for layer in grouped for weight in layer.weights if not tf_divided_memory.is_divided(weight)]
    mapping = [(weight, sent(tf.convert_to_tensor(weight), homes[0], homes[replica])) for weight in copied]
    variables = keras_variables.state(model)
    with (
        copies.read_on(homes[0], homes[replica]) if copies else contextlib.nullcontext(),
        tf_tapes.replaced(mapping, collect_losses=True) as scope,
        random_state.replica_seeds(lambda: replica),
    ):
        before = list(map(scope.get_current_value, variables))
        yield
    states = [(one, old) for one, old in zip(variables, before, strict=True) if one.name != _SEED]
    changed = [one.path for one, old in states if scope.get_current_value(one) is not old]
    if scope.losses or changed:
        what = f"a change of {changed[0]!r}" if changed else "a loss that a layer adds"
        raise ValueError(
            "Replicas compute parts of a batch, so a layer can neither add a loss nor change a state, received "
            f"{what}. Use TensorParallel without replicas."
        )


def joined(outputs: Sequence[Any], homes: Sequence[str], num_examples: tf.Tensor) -> Any:
    """Return the outputs of all replicas as those of the whole batch, on the first device.

    Args:
        outputs: The outputs of each replica, in the structure of the model's.
        homes: The first device of each replica.
        num_examples: The size of the batch; a smaller one than the number of replicas is computed by each.
    """

    def join(*parts: Any) -> Any:
        if not tf.is_tensor(parts[0]):
            return parts[0]
        masks = [keras_model.mask_of(part) for part in parts]
        logits = [keras_probabilities.sent_as(part) for part in parts]
        here = [sent(part, home, homes[0]) for (part, _), home in zip(logits, homes, strict=True)]
        with tf.device(homes[0]):
            whole = data.take_rows(data.join_batches(here), 0, num_examples)
        whole = _with_joined_pieces(whole, [part for part, _ in logits], num_examples)
        with tf.device(homes[0]):
            whole = keras_probabilities.received_as(whole, logits[0][1])
            mask = None if masks[0] is None else data.take_rows(tf.concat(masks, 0), 0, num_examples)
            return keras_model.with_mask(whole, mask) if isinstance(whole, tf.Tensor) else whole

    return keras.tree.map_structure(join, *outputs)


def _with_joined_pieces(whole: Any, parts: Sequence[Any], num_examples: tf.Tensor) -> Any:
    """Note the pieces of joined scores of classes, each on the device of its shard in the first replica."""
    found = [pieces for pieces in map(gathered_classes.pieces_of, parts) if pieces is not None]
    if len(found) < len(parts):
        return whole
    joined_pieces = []
    for shard, device in enumerate(found[0].devices):
        here = [sent(of_one.tensors[shard], of_one.devices[shard], device) for of_one in found]
        with tf.device(device):
            joined_pieces.append(data.take_rows(tf.concat(here, 0), 0, num_examples))
    return gathered_classes.note_pieces(whole, ClassPieces(joined_pieces, found[0].devices))

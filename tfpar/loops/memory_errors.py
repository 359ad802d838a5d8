"""Out-of-memory errors of TensorFlow, explained in one sentence."""

from __future__ import annotations

import os
import re

import tensorflow as tf

from tfpar.cluster.gpu import gpu_cards, gpus

_IS_MEMORY = re.compile(r"OOM when allocating|[Oo]ut of memory|[Ff]ailed to allocate")
_TENSOR = re.compile(r"allocating tensor with shape ?(\[[\d,]*\])(?: and type (\w+))?")
_DEVICE = re.compile(r"device:([A-Z]+:\d+)")


def explain(error: BaseException) -> str | None:
    """Return a sentence about an out-of-memory error of a device; None for any other error.

    Example:
        >>> message = "OOM when allocating tensor with shape[8,4] and type float on /job:localhost/device:GPU:0 by"
        >>> explain(tf.errors.ResourceExhaustedError(None, None, message))
        'GPU:0 must have memory for the step, and a tensor of shape [8,4] and type float could not be allocated. ...'
    """
    if not isinstance(error, tf.errors.ResourceExhaustedError) or not _IS_MEMORY.search(error.message):
        return None
    name, tensor = _DEVICE.search(error.message), _TENSOR.search(error.message)
    device = name[1] if name else "A device"
    what = "an operation could not allocate it"
    if tensor:
        kind = f" and type {tensor[2]}" if tensor[2] else ""
        what = f"a tensor of shape {tensor[1]}{kind} could not be allocated"
    others = ", or end other processes on the GPU" if device.startswith("GPU") else ""
    return (
        f"{device} must have memory for the step, and {what}.{_in_use(device)} Use a smaller batch with "
        f"gradient_accumulation_steps, or a pipeline, in which each device holds one stage{others}."
    )


def _in_use(device: str) -> str:
    """Return a sentence with the memory in use on a GPU; empty if unknown."""
    if not device.startswith("GPU:"):
        return ""
    cards, index = gpu_cards.cards_of_gpus(), int(device[4:])
    try:
        visible = gpus.find(os.environ).gpus
    except ValueError:  # CUDA_VISIBLE_DEVICES is invalid
        return ""
    card = cards[index] if index < len(cards) else len(visible)
    if card >= len(visible) or visible[card].used_mib is None:
        return ""
    return (
        f" nvidia-smi reports {visible[card].used_mib:,} of {visible[card].total_mib:,} MiB in use, by all processes."
    )

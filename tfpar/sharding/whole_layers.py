"""Warnings and preview lines about layers that are not sharded."""

from __future__ import annotations

import collections
from collections.abc import Container, Hashable, Mapping, Sequence

import keras

from tfpar.messages import user_warnings
from tfpar.pipeline.graph.ir import Call
from tfpar.placement.owners import num_bytes
from tfpar.sharding.model_sharding import ModelSharding

_LARGE_PART = 0.25  # of the bytes of all weights
_NUM_CLASSES, _SMALL_PART = 3, 0.01  # the most classes in a line, and the least part of the bytes to be named


def warn_of_nothing(model: keras.Model, reasons: Mapping[str, str]) -> None:
    """Warn that no layer of a model is sharded.

    Args:
        model: The model.
        reasons: The name of each large call that is not sharded, with the reason. Empty if the user's rules keep all
            weights whole.
    """
    if not model.weights:
        return
    name, reason = next(iter(reasons.items()), ("", "its rules keep all weights whole"))
    where = f"{name!r}: {reason}" if name else reason
    user_warnings.warn(
        f"No layer of {model.name!r} is sharded ({where}), and the first device of its shards computes all of it. Use "
        "Mirrored, or a Pipeline without num_shards."
    )


def warn_of_whole(
    model: keras.Model, calls: Sequence[Call], sharded: Container[Hashable], reasons: Mapping[str, str]
) -> None:
    """Warn if a large part of the weights is not sharded, in large layers or in many small ones.

    Args:
        model: The model.
        calls: Its layer calls.
        sharded: The `id` of each sharded weight.
        reasons: The name of each large call that is not sharded, with the reason.
    """
    share, line = whole_share(model, calls, sharded, reasons)
    if share >= _LARGE_PART:
        user_warnings.warn(f"{line[0].upper()}{line[1:]}. The first device holds and computes them alone.")


def whole_share(
    model: keras.Model, calls: Sequence[Call], sharded: Container[Hashable], reasons: Mapping[str, str]
) -> tuple[float, str]:
    """Return the share of the bytes of weights that are not sharded, and a line about the largest layer classes.

    Args:
        model: The model.
        calls: Its layer calls.
        sharded: The `id` of each sharded weight.
        reasons: The name of each large call that is not sharded, with the reason.
    """
    all_bytes = sum(map(num_bytes, model.weights)) or 1
    left = {id(weight): num_bytes(weight) for weight in model.weights if id(weight) not in sharded}
    share = sum(left.values()) / all_bytes
    shares, names = collections.defaultdict[str, float](float), collections.defaultdict[str, list[str]](list)
    for call in calls:
        own = sum(left.pop(key, 0) for key in map(id, call.variables)) / all_bytes
        if own:
            shares[type(call.operation).__name__] += own
            names[type(call.operation).__name__].append(call.name)
    ordered = sorted(shares.items(), key=lambda item: -item[1])[:_NUM_CLASSES]
    largest = [_class_line(kind, part, names[kind], reasons) for kind, part in ordered if part >= _SMALL_PART]
    named = f": {', '.join(largest)}" if largest else ""
    return share, f"{100 * share:.0f} % of the bytes of the weights of {model.name!r} stay whole{named}"


def _class_line(kind: str, share: float, names: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Describe the calls of a layer class that are not sharded, with the reason of the first large one."""
    name = next((name for name in names if name in reasons), names[0])
    which = repr(name) if len(names) == 1 else f"{len(names)} of the class {kind} such as {name!r}"
    return f"{which} ({100 * share:.0f} %: {reasons.get(name) or 'their weights are small or cannot be sharded'})"


def lines_of(calls: Sequence[Call], sharding: ModelSharding) -> list[str]:
    """Return a line for each sharded call, and for each large call that is not.

    Args:
        calls: The layer calls of a model or of a stage.
        sharding: Their sharding.
    """
    rules = {
        call.name: rule.name for call, rule in zip(calls, sharding.rules, strict=True) if rule is not None and rule.cuts
    }
    lines = [f"{name} is sharded by {rule}" for name, rule in rules.items()]
    return lines + [f"{name} is whole: {reason}" for name, reason in sharding.whole.items()]

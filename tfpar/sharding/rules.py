"""The user's sharding rules: regular expressions of variable paths with axes to shard, like Keras' `LayoutMap`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tfpar.messages.suggestions import closest
from tfpar.sharding.model_sharding import Weight

AXIS_NAME = "model"
Rules = Mapping[str, Sequence[str | None]]


def check_rules(rules: Any) -> dict[str, tuple[str | None, ...]] | None:
    """Check rules, and return them as tuples.

    Args:
        rules: Maps regular expressions to tuples with an entry for each axis of a weight: `"model"` for the sharded
            axis, None for others.

    Raises:
        TypeError: If the rules are not a mapping of strings to sequences.
        ValueError: If an expression is malformed, or an entry is neither `"model"` nor None.
    """
    if rules is None:
        return None
    if not isinstance(rules, Mapping) or not rules:
        raise TypeError(
            'layout must be a mapping such as {".*dense.*kernel": (None, "model")} with at least one rule, or None, '
            f"received {rules!r}."
        )
    checked = {}
    for pattern, axes in rules.items():
        if not isinstance(pattern, str) or isinstance(axes, str) or not isinstance(axes, Sequence):
            raise TypeError(
                'A rule of layout maps a regular expression to a tuple such as (None, "model"), received '
                f"{pattern!r}: {axes!r}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"A rule of layout begins with a regular expression, received {pattern!r}: {error}."
            ) from None
        if any(axis not in (None, AXIS_NAME) for axis in axes) or list(axes).count(AXIS_NAME) > 1:
            raise ValueError(
                f'A rule of layout names at most one axis "model" and None for the others, received {tuple(axes)!r} '
                f"for {pattern!r}."
            )
        checked[pattern] = tuple(axes)
    return checked


def axes_by_rules(rules: Rules, weights: Mapping[Hashable, Weight]) -> dict[Hashable, int | None]:
    """Return the axis to shard of each weight that a rule names, or None if the rule keeps it whole.

    Args:
        rules: The rules. An expression may match anywhere in the path of a weight.
        weights: The weights of a model, by key.

    Raises:
        ValueError: If a rule names no weight, two rules name the same, or a rule has another number of axes than its
            weight.

    Example:
        >>> axes_by_rules({"kernel": (None, "model")}, {0: Weight("dense/kernel", (4, 8), 128)})
        {0: 1}
    """
    shard_axes: dict[Hashable, int | None] = {}
    for key, weight in weights.items():
        matching = [pattern for pattern in rules if re.search(pattern, weight.path)]
        if len(matching) > 1:
            raise ValueError(
                f"One rule of layout may name a weight, and {matching[0]!r} and {matching[1]!r} both name "
                f"{weight.path!r}. Make one of them narrower."
            )
        for pattern in matching:
            axes = rules[pattern]
            if len(axes) != len(weight.shape):
                raise ValueError(
                    f"A rule of layout has an entry for each axis of its weights, and {pattern!r} has {len(axes)} for "
                    f"{weight.path!r} of shape {weight.shape}. Write {len(weight.shape)} entries."
                )
            shard_axes[key] = list(axes).index(AXIS_NAME) if AXIS_NAME in axes else None
    for pattern in rules:
        if not any(re.search(pattern, weight.path) for weight in weights.values()):
            paths = [weight.path for weight in weights.values()]
            near = closest(pattern, paths) or next(iter(paths), "none")
            raise ValueError(
                f"A rule of layout must name a weight, and {pattern!r} is found in no path of the model, such as "
                f"{near!r}. Change or remove the rule."
            )
    return shard_axes

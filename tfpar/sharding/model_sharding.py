"""Chooses which layer calls of a model are sharded, and along which axes.

    x ──► Dense(4096) by columns ──► gelu ──► Dense(512) by rows ──► sum ──► y
    whole    sharded along -1    sharded along -1    partial sums    whole

Each layer offers sharding rules, of which its calls choose one. The result is plain data about weights and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

# A layer call with less than this part of all bytes of weights, and of all multiplications, stays whole, unless its
# input is sharded and would have to be gathered.
SMALLEST_PART = 0.001


class Sharding(NamedTuple):
    """How a tensor is sharded.

    Args:
        axis: The sharded axis.
        sizes: The size of each shard along it.
    """

    axis: int
    sizes: tuple[int, ...]


class Cut(NamedTuple):
    """The axis along which a sharding rule cuts a weight or value.

    Args:
        axis: The axis.
        per_unit: The number of elements along the axis per unit of the rule.
    """

    axis: int
    per_unit: int = 1


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """One of the ways in which a layer call can be sharded.

    Args:
        name: Such as "columns".
        size: The number of units to shard, such as columns or heads. None takes that of the sharded input.
        cuts: The cut of each sharded weight, by the weight's key.
        takes: The axis along which inputs are sharded, or None for whole inputs.
        gives: The cut of the output. None for a whole output, the sum of partial results.
        run: Computes the outputs.
    """

    name: str
    size: int | None = None
    cuts: Mapping[Hashable, Cut] = dataclasses.field(default_factory=dict)
    takes: int | None = None
    gives: Cut | None = None
    run: Callable[..., Any] | None = None


class Weight(NamedTuple):
    """A weight of a model.

    Args:
        path: Its path.
        shape: Its shape.
        num_bytes: Its size.
        whole_because: Why it cannot be sharded, or an empty string.
    """

    path: str
    shape: tuple[int, ...]
    num_bytes: int
    whole_because: str = ""


class Offer(NamedTuple):
    """A layer call with its sharding rules.

    Args:
        name: The name of the call.
        inputs: The keys of its input values.
        outputs: The keys of its output values.
        weights: The keys of the weights that it reads.
        rules: Its sharding rules, in order of preference.
        whole_because: Why a call without rules is not sharded.
        num_positions: How often an example is multiplied by the weights.
    """

    name: str
    inputs: tuple[Hashable, ...]
    outputs: tuple[Hashable, ...]
    weights: tuple[Hashable, ...]
    rules: tuple[ShardingRule, ...]
    whole_because: str
    num_positions: int = 1


@dataclasses.dataclass(frozen=True)
class ModelSharding:
    """How the layer calls of a model are sharded.

    Args:
        rules: The rule of each layer call, or None for a call that only runs on the first device.
        weights: The sharding of each sharded weight, by its key.
        values: The sharding of each sharded value, by its key.
        whole: The name of each large call that is not sharded, with the reason.
    """

    rules: tuple[ShardingRule | None, ...]
    weights: Mapping[Hashable, Sharding]
    values: Mapping[Hashable, Sharding]
    whole: Mapping[str, str]


def even_sizes(size: int, num_shards: int) -> tuple[int, ...]:
    """Split a size into parts that differ by at most one, larger ones first.

    Args:
        size: The number of units.
        num_shards: The number of shards.

    Example:
        >>> even_sizes(10, 3)
        (4, 3, 3)
    """
    return tuple(size // num_shards + (shard < size % num_shards) for shard in range(num_shards))


def plan(
    offers: Sequence[Offer],
    weights: Mapping[Hashable, Weight],
    num_shards: int,
    wanted: Mapping[Hashable, int | None] | None = None,
) -> ModelSharding:
    """Choose a sharding rule for each layer call.

    Calls choose in order, each by how its inputs are sharded: a Dense layer by rows for a sharded input, and by columns
    for a whole one. A weight that two calls would shard differently stays whole.

    Args:
        offers: The layer calls of a model, in order.
        weights: All weights of the model, by key.
        num_shards: The number of shards.
        wanted: The axis along which the user's rules shard each weight, None for weights that stay whole. Without
            rules, all large layers are sharded, and small ones with a sharded input.

    Raises:
        ValueError: If the user's rules shard a weight along an axis that its layer does not offer.

    Example:
        >>> columns = ShardingRule("columns", 8, {"kernel": Cut(1)}, gives=Cut(-1))
        >>> offer = Offer("dense", ("x",), ("y",), ("kernel",), (columns,), "")
        >>> plan([offer], {"kernel": Weight("dense/kernel", (4, 8), 128)}, 2).values["y"].sizes
        (4, 4)
    """
    kept: dict[Hashable, str] = {key: weight.whole_because for key, weight in weights.items() if weight.whole_because}
    while True:
        search = _Search(offers, weights, num_shards, wanted, kept)
        sharding = search.run()
        conflicts = search.conflicts
        if not conflicts:
            return sharding
        kept |= conflicts


class _Search:
    """A single pass over the layer calls, with some weights that must stay whole."""

    def __init__(
        self,
        offers: Sequence[Offer],
        weights: Mapping[Hashable, Weight],
        num_shards: int,
        wanted: Mapping[Hashable, int | None] | None,
        kept: Mapping[Hashable, str],
    ) -> None:
        self._offers, self._weights, self._num_shards = offers, weights, num_shards
        self._wanted, self._kept = wanted, kept
        self._least_bytes = SMALLEST_PART * sum(weight.num_bytes for weight in weights.values())
        self._least_work = SMALLEST_PART * sum(self._num_bytes(offer.weights) * offer.num_positions for offer in offers)
        self._shardings: dict[Hashable, Sharding] = {}
        self._values: dict[Hashable, Sharding] = {}
        self._read_whole: dict[Hashable, str] = {}
        self._unmet: dict[Hashable, str] = {}
        self.conflicts: dict[Hashable, str] = {}

    def run(self) -> ModelSharding:
        rules, whole = [], dict[str, str]()
        for offer in self._offers:
            rule, reason = self._choose(offer)
            rules.append(rule)
            if rule is None:
                for key in offer.weights:
                    self._read_whole.setdefault(key, offer.name)
                if reason:
                    whole[offer.name] = reason
        if self._wanted is None:
            both = [key for key in self._shardings if key in self._read_whole]
            self.conflicts |= {key: f"{self._read_whole[key]!r} reads it whole" for key in both}
        if not self.conflicts:
            self._refuse_unmet()
        return ModelSharding(tuple(rules), self._shardings, self._values, whole)

    def _choose(self, offer: Offer) -> tuple[ShardingRule | None, str]:
        """Return the rule of a layer call, or None with the reason, which is empty for small weights."""
        reasons: list[tuple[ShardingRule, str]] = []
        for rule in offer.rules:
            sizes = self._sizes(rule, offer)
            if sizes is None:
                continue
            reason = self._obstacle(rule, sizes, offer)
            if not reason:
                self._note(rule, sizes, offer)
                return rule, ""
            reasons.append((rule, reason))
        if self._wanted is not None:
            self._note_unmet(offer, reasons)
            return None, ""
        if not self._is_large(offer.weights, offer.num_positions):
            return None, ""
        return None, next(
            (reason for _, reason in reasons),
            "its input is not sharded" if offer.rules else offer.whole_because,
        )

    def _sizes(self, rule: ShardingRule, offer: Offer) -> tuple[int, ...] | None:
        """Return the units of each shard, or None if the rule does not fit the inputs."""
        shardings = [self._values.get(value) for value in offer.inputs]
        if rule.takes is None:
            return even_sizes(rule.size or 0, self._num_shards)
        first = shardings[0] if shardings else None
        if first is None:
            # The user's rules may ask for rows after a whole value, which is then split.
            is_asked = any((self._wanted or {}).get(key) is not None for key in rule.cuts)
            return even_sizes(rule.size, self._num_shards) if is_asked and rule.size and not any(shardings) else None
        if any(sharding != first for sharding in shardings) or first.axis != rule.takes:
            return None
        return first.sizes if rule.size in (None, sum(first.sizes)) else None

    def _obstacle(self, rule: ShardingRule, sizes: tuple[int, ...], offer: Offer) -> str:
        """Return the reason against a rule, or an empty string."""
        if not rule.cuts:
            return ""
        if min(sizes) < 1:
            return f"{self._num_shards} shards need as many {rule.name}, received {sum(sizes)}"
        if self._wanted is not None and (reason := self._against_rules(rule, offer, self._wanted)):
            return reason
        for key, cut in rule.cuts.items():
            if key in self._kept:
                return f"{self._weights[key].path!r} stays whole: {self._kept[key]}"
            sharding = _scaled(cut, sizes)
            if self._shardings.get(key, sharding) != sharding:
                self.conflicts[key] = "layers would shard it differently"
                return self.conflicts[key]
        begins = self._wanted is None and not any(value in self._values for value in offer.inputs)
        is_large = not begins or self._is_large(tuple(rule.cuts), offer.num_positions)
        return "" if is_large else "its weights are small"

    def _against_rules(self, rule: ShardingRule, offer: Offer, wanted: Mapping[Hashable, int | None]) -> str:
        if all(wanted.get(key) is None for key in offer.weights):
            return "no rule names it"
        for key in offer.weights:
            cut, axis = rule.cuts.get(key), wanted.get(key)
            if axis is not None and (cut is None or cut.axis != axis):
                outcome = "stay whole" if cut is None else f"be sharded at axis {cut.axis}"
                return f"by {rule.name}, {self._weights[key].path!r} would {outcome}"
            if cut is not None and key in wanted and axis is None:
                return f"by {rule.name}, {self._weights[key].path!r} would be sharded too, and its rule keeps it whole"
        return ""

    def _note(self, rule: ShardingRule, sizes: tuple[int, ...], offer: Offer) -> None:
        self._shardings.update((key, _scaled(cut, sizes)) for key, cut in rule.cuts.items())
        if rule.gives is not None:
            self._values.update((value, _scaled(rule.gives, sizes)) for value in offer.outputs)

    def _is_large(self, keys: Sequence[Hashable], num_positions: int) -> bool:
        total = self._num_bytes(keys)
        return total > 0 and (total >= self._least_bytes or total * num_positions >= self._least_work)

    def _num_bytes(self, keys: Sequence[Hashable]) -> int:
        return sum(self._weights[key].num_bytes for key in keys if key in self._weights)

    def _note_unmet(self, offer: Offer, reasons: Sequence[tuple[ShardingRule, str]]) -> None:
        for key in offer.weights:
            axis = (self._wanted or {}).get(key)
            if axis is not None:
                as_asked = (reason for rule, reason in reasons if key in rule.cuts and rule.cuts[key].axis == axis)
                self._unmet.setdefault(key, next(as_asked, "") or _against_axis(offer, key, axis))

    def _refuse_unmet(self) -> None:
        for key, axis in (self._wanted or {}).items():
            if axis is not None and key not in self._shardings:
                reason = self._unmet.get(key, "no layer call reads it")
                raise ValueError(
                    f"A rule of layout shards {self._weights[key].path!r} at axis {axis}, which is not possible: "
                    f"{reason}. Change or remove the rule."
                )


def _against_axis(offer: Offer, key: Hashable, axis: int) -> str:
    """Return why a layer call cannot shard a weight along an axis."""
    possible = sorted({rule.cuts[key].axis for rule in offer.rules if key in rule.cuts})
    if axis in possible:
        return f"{offer.name!r} takes a sharded input, and its input is not sharded like that"
    if possible:
        return f"{offer.name!r} can be sharded at axis {' or '.join(map(str, possible))}"
    return f"no sharding rule of {offer.name!r} shards it" if offer.rules else offer.whole_because


def _scaled(cut: Cut, sizes: Sequence[int]) -> Sharding:
    return Sharding(cut.axis, tuple(cut.per_unit * size for size in sizes))

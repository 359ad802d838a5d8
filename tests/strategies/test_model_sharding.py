"""The sharding of a model as pure data: the sharding rule of each layer call, and what a user's rules say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tfpar.sharding.model_sharding import Cut, ModelSharding, Offer, Sharding, ShardingRule, Weight, even_sizes, plan
from tfpar.sharding.rules import axes_by_rules, check_rules


def dense(name: str, inputs: tuple[str, ...], rows: int, columns: int, kernel: str = "") -> Offer:
    key = kernel or f"{name}/kernel"
    rules = (
        ShardingRule("rows", rows, {key: Cut(0)}, takes=-1),
        ShardingRule("columns", columns, {key: Cut(1), f"{name}/bias": Cut(0)}, gives=Cut(-1)),
    )
    return Offer(name, inputs, (name,), (key, f"{name}/bias"), rules, "")


def elementwise(name: str, *inputs: str) -> Offer:
    rules = tuple(ShardingRule("elements", None, {}, axis, Cut(axis)) for axis in (-1, -2))
    return Offer(name, inputs, (name,), (), rules, "")


def whole(name: str, *inputs: str, weights: tuple[str, ...] = ()) -> Offer:
    return Offer(name, inputs, (name,), weights, (), "layers of the class Lambda are not sharded")


def normalization(name: str, given: str, channels: int) -> Offer:
    rule = ShardingRule("channels", channels, {f"{name}/gamma": Cut(0)}, takes=-1, gives=Cut(-1))
    return Offer(name, (given,), (name,), (f"{name}/gamma",), (rule,), "")


def weights_of(*offers: Offer, reasons: Mapping[str, str] | None = None) -> dict[Any, Weight]:
    sizes: dict[Any, tuple[int, ...]] = {}
    for offer in offers:
        rows, columns = (
            next((rule.size or 1 for rule in offer.rules if rule.name == name), 1) for name in ("rows", "columns")
        )
        for key in offer.weights:
            sizes.setdefault(key, (columns,) if key.endswith("bias") else (rows, columns))
    given = reasons or {}
    return {
        key: Weight(key, shape, 4 * shape[0] * (shape[1] if len(shape) > 1 else 1), given.get(key, ""))
        for key, shape in sizes.items()
    }


def names(sharding: ModelSharding) -> list[str | None]:
    return [rule and rule.name for rule in sharding.rules]


def test_sizes_differ_by_at_most_one() -> None:
    assert [even_sizes(size, 3) for size in (12, 10, 2)] == [(4, 4, 4), (4, 3, 3), (1, 1, 0)]


def test_layers_are_sharded_in_pairs_with_elementwise_calls_between() -> None:
    offers = [dense("up", ("x",), 8, 32), elementwise("gelu", "up"), dense("down", ("gelu",), 32, 8)]
    sharding = plan(offers, weights_of(*offers), 2)
    assert names(sharding) == ["columns", "elements", "rows"]
    assert sharding.weights["up/bias"] == Sharding(0, (16, 16))
    assert sharding.weights["down/kernel"] == Sharding(0, (16, 16))
    assert "down/bias" not in sharding.weights, "it is added once, to the sum"
    assert "down" not in sharding.values


def test_the_product_of_two_sharded_layers_is_sharded() -> None:
    offers = [dense("gate", ("x",), 8, 32), dense("up", ("x",), 8, 32), elementwise("product", "gate", "up")]
    offers.append(dense("down", ("product",), 32, 8))
    assert names(plan(offers, weights_of(*offers), 3)) == ["columns", "columns", "elements", "rows"]


def test_a_value_of_another_placement_is_gathered() -> None:
    offers = [dense("up", ("x",), 8, 32), elementwise("sum", "up", "x"), dense("down", ("sum",), 32, 8)]
    assert names(plan(offers, weights_of(*offers), 2)) == ["columns", None, "columns"]


def test_small_layers_stay_whole_without_a_word_and_others_with_the_reason() -> None:
    offers = [
        dense("large", ("x",), 64, 640),
        dense("head", ("large",), 640, 1),
        whole("mixer", "x", weights=("mixer/kernel",)),
    ]
    weights = weights_of(*offers) | {"mixer/kernel": Weight("mixer/kernel", (64, 64), 16384)}
    sharding = plan([*offers, dense("tiny", ("x",), 2, 2)], weights | weights_of(dense("tiny", ("x",), 2, 2)), 2)
    assert names(sharding) == ["columns", "rows", None, None]
    assert sharding.whole == {"mixer": "layers of the class Lambda are not sharded"}


def test_a_small_layer_takes_shards_and_does_not_begin_a_sharding() -> None:
    offers = [dense("up", ("x",), 64, 640), normalization("norm", "up", 640), dense("down", ("norm",), 640, 64)]
    offers = [normalization("first", "x", 64), *offers, normalization("last", "down", 64)]
    weights = weights_of(*offers) | {f"{name}/gamma": Weight(f"{name}/gamma", (8,), 32) for name in ("norm", "first")}
    weights |= {"last/gamma": Weight("last/gamma", (1000, 1000), 4_000_000)}
    sharding = plan(offers, weights, 2)
    assert names(sharding) == [None, "columns", "channels", "rows", None]
    assert sharding.weights["norm/gamma"] == Sharding(0, (320, 320))
    assert sharding.whole == {"last": "its input is not sharded"}, "a large one is named"


def test_a_layer_with_few_bytes_and_many_multiplications_is_large() -> None:
    offers = [dense("few", ("x",), 8, 8), dense("many", ("few",), 1000, 1000)]
    assert names(plan(offers, weights_of(*offers), 2)) == [None, "columns"]
    offers[0] = offers[0]._replace(num_positions=1000)
    assert names(plan(offers, weights_of(*offers), 2))[0] == "columns"


def test_a_rule_divides_a_small_layer_or_is_refused_with_the_reason() -> None:
    offers = [dense("big", ("x",), 1000, 1000), dense("head", ("big",), 1000, 1)]
    weights = weights_of(*offers)
    assert names(plan(offers, weights, 2, {"head/kernel": 0})) == [None, "rows"]
    with pytest.raises(
        ValueError, match=r"'head/kernel' at axis 1, .*: 2 shards need as many columns, received 1\. Change"
    ):
        plan(offers, weights, 2, {"head/kernel": 1})
    with pytest.raises(ValueError, match=r"'head/kernel' at axis 2, .*: 'head' can be sharded at axis 0 or 1\."):
        plan(offers, weights, 2, {"head/kernel": 2})


def test_a_weight_that_another_layer_reads_whole_stays_whole() -> None:
    table = ShardingRule("rows of the table", 100, {"table": Cut(0)})
    offers = [
        Offer("embedding", ("tokens",), ("embedding",), ("table",), (table,), ""),
        whole("logits", "embedding", weights=("table",)),
    ]
    sharding = plan(offers, {"table": Weight("table", (100, 8), 3200)}, 2)
    assert names(sharding) == [None, None]
    assert sharding.whole["embedding"] == "'table' stays whole: 'logits' reads it whole"


def test_a_layer_that_is_used_twice_is_sharded_in_one_rule() -> None:
    offers = [dense("first", ("x",), 8, 8, "tied"), dense("second", ("first",), 8, 8, "tied")]
    sharding = plan(offers, weights_of(*offers), 2)
    assert names(sharding) in (["columns", "columns"], [None, None])
    assert len({sharding.weights.get("tied")}) == 1


def test_rules_choose_the_axis_and_leave_other_weights_whole() -> None:
    offers = [dense("first", ("x",), 8, 8), dense("second", ("first",), 8, 8), dense("third", ("second",), 8, 8)]
    weights = weights_of(*offers)
    rules = check_rules({"first/kernel": (None, "model"), "third.*kernel": ["model", None]})
    sharding = plan(offers, weights, 2, axes_by_rules(rules or {}, weights))
    assert names(sharding) == ["columns", None, "rows"]


def test_a_rule_against_another_names_the_weight_of_the_other() -> None:
    offers = [dense("first", ("x",), 8, 8)]
    reason = (
        r"'first/kernel' at axis 1, .*: by columns, 'first/bias' would be sharded too, and its rule keeps it whole\."
    )
    with pytest.raises(ValueError, match=reason):
        plan(offers, weights_of(*offers), 2, {"first/kernel": 1, "first/bias": None})
    with pytest.raises(ValueError, match=r"'first/kernel' at axis 0, .*: by rows, 'first/bias' would stay whole\."):
        plan(offers, weights_of(*offers), 2, {"first/kernel": 0, "first/bias": 0})


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"nothing": (None, "model")}, ValueError, "'nothing' is found in no path .* such as 'dense/kernel'"),
        ({"dense": (None, None), "kernel": (None, None)}, ValueError, "'dense' and 'kernel' both name 'dense/kernel'"),
        ({"kernel": ("model",)}, ValueError, r"'kernel' has 1 for 'dense/kernel' of shape \(4, 8\)"),
        ({"kernel": ("model", "model")}, ValueError, 'at most one axis "model"'),
        ({"kernel": ("batch", None)}, ValueError, 'at most one axis "model"'),
        ({"(": (None,)}, ValueError, "begins with a regular expression, received '\\('"),
        ({"kernel": "model"}, TypeError, "to a tuple such as"),
        ({}, TypeError, "at least one rule"),
        ("kernel", TypeError, "must be a mapping"),
    ],
    ids=lambda value: re.sub(r"\W+", "_", str(value))[:30],
)  # fmt: skip
def test_bad_rules_are_refused(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        axes_by_rules(check_rules(rules) or {}, {0: Weight("dense/kernel", (4, 8), 128)})

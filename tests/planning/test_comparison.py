"""Pipelines with split backward passes are compared where their price is known, or can decide."""

from __future__ import annotations

import dataclasses

import pytest

from tfpar.pipeline.schedule.links import Link
from tfpar.planning.comparison import compare, may_split
from tfpar.planning.costs import BlockCost, Curve, Line, MachineCosts, ModelCosts

BLOCKS = tuple(BlockCost(f"dense_{number}", Line(0, 1e-4), Line(0, 2e-4), 4, 4) for number in range(8))
MODEL = ModelCosts("mlp", 100, 400, 400, 800, (100,) * 4, 64, Curve((64,), (0.8,)), 0.01, blocks=BLOCKS)
FAST = MachineCosts("GPU", 2, 2)
SLOW = dataclasses.replace(FAST, reduce={2: Link(1.0, 1e9)})  # a second for each sum of gradients


@pytest.mark.parametrize(
    ("machine", "expected"), [(FAST, False), (SLOW, True)], ids=["replicas lead", "pipelines lead"]
)
def test_split_passes_are_measured_only_where_they_could_lead(machine: MachineCosts, expected: bool) -> None:
    assert may_split(dataclasses.replace(MODEL, split_factor=None), machine) == expected


def test_layouts_with_a_price_that_is_not_known_are_not_compared() -> None:
    found = {
        factor: [str(row.layout) for row in compare(dataclasses.replace(MODEL, split_factor=factor), SLOW).rows]
        for factor in (None, 1.0)
    }
    assert any("zero_bubble" in one for one in found[1.0])
    assert not any("zero_bubble" in one for one in found[None])
    assert any("Pipeline" in one for one in found[None])

"""Every architecture of `keras.applications`, cut into 2, 4 and 8 stages, must give the unsplit model's output.

All of them take minutes: `python -m tests.architectures`, or with names after it. The suite takes a few.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from tfpar.pipeline import graph as model_graph
from tfpar.pipeline.graph import Graph
from tfpar.pipeline.split import Stage, split

SMALLEST_SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}  # 32 for all others
# Of three kinds of graph one; `python -m tests.architectures` takes all.
DIFFERENT = ("EfficientNetB0", "InceptionV3", "MobileNetV3Small")


def all_names() -> list[str]:
    """Names of the architectures."""
    return sorted(name for name, member in vars(keras.applications).items() if inspect.isfunction(member))


def equal_balance(num_calls: int, num_stages: int) -> list[int]:
    """Nearly equal numbers of calls."""
    ends = [num_calls * stage // num_stages for stage in range(num_stages + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def run_stages(graph: Graph, stages: Sequence[Stage], inputs: Sequence[Any], training: bool = False) -> Any:
    """The outputs of a model, where each stage sees its inputs and no other tensor."""
    known = dict(zip(graph.inputs, inputs, strict=True))
    for stage in stages:
        tensors = {value: known[value] for value in stage.inputs}
        model_graph.run(stage.calls, tensors, training)
        known |= {value: tensors[value] for value in stage.outputs}
    last = {value: known[value] for value in stages[-1].outputs}
    return keras.tree.map_structure(last.get, graph.outputs)


def check(name: str) -> str:
    """Cut one architecture and compare; say how many calls it has and how long it took."""
    began = time.process_time()
    size = SMALLEST_SIZES.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3))
    images = np.random.default_rng(0).uniform(0, 255, (2, size, size, 3)).astype("float32")
    expected = model(images)
    built = time.process_time()
    graph = model_graph.trace(model)
    traced = time.process_time()
    for num_stages in (2, 4, 8):
        stages = split(graph, equal_balance(len(graph.calls), num_stages))
        found = run_stages(graph, stages, model_graph.standardize(model, images))
        np.testing.assert_array_equal(found, expected, f"{name} in {num_stages} stages")
    return f"{len(graph.calls)} calls, built in {built - began:.1f} s, traced in {traced - built:.2f} s of CPU time"


if __name__ == "__main__":
    for architecture in sys.argv[1:] or all_names():
        print(f"{architecture}: {check(architecture)}", flush=True)
        keras.utils.clear_session()

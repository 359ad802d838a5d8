"""Every architecture of `keras.applications` in 2, 4 and 8 stages: split, checked, trained a step, and predicted with.

All of them take hours: `python -m tests.support.architectures`, or with names after it; `--from NAME` resumes there,
and `--minutes 30` starts no other one after that time. The suite takes a few.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import tfpar
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph
from tfpar.pipeline.partition.stages import Stage, split_graph

SMALLEST_SIZES = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}  # 32 for all others
# Of three kinds of graph one; `python -m tests.support.architectures` takes all.
DIFFERENT = ("EfficientNetB0", "InceptionV3", "MobileNetV3Small")
# Smaller than the smallest ones of Keras, in depth or width; ConvNeXt's grouped convolutions are compiled with XLA.
RUN_IN_THE_SUITE = {"ConvNeXtTiny": 4, "MobileNet": 2}
NUM_CLASSES = 10


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


def build(name: str) -> keras.Model:
    """One architecture, without weights, for its smallest images."""
    size = SMALLEST_SIZES.get(name, 32)
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(size, size, 3), classes=NUM_CLASSES, classifier_activation=None)
    model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def images_of(name: str) -> np.ndarray:
    """Four images."""
    size = SMALLEST_SIZES.get(name, 32)
    return np.random.default_rng(0).uniform(0, 255, (4, size, size, 3)).astype("float32")


def check(name: str) -> str:
    """Cut one architecture and compare; say how many calls it has and how long it took."""
    began = time.process_time()
    model, images = build(name), images_of(name)
    expected = model(images)
    built = time.process_time()
    graph = model_graph.trace(model)
    traced = time.process_time()
    for num_stages in (2, 4, 8):
        stages = split_graph(graph, equal_balance(len(graph.calls), num_stages))
        found = run_stages(graph, stages, model_graph.standardize(model, images))
        np.testing.assert_array_equal(found, expected, f"{name} in {num_stages} stages")
    return f"{len(graph.calls)} calls, built in {built - began:.1f} s, traced in {traced - built:.2f} s of CPU time"


def run(name: str, num_stages: int) -> str:
    """Predict with one architecture as a pipeline, train it for a step, and say how long that took."""
    began = time.process_time()
    keras.utils.set_random_seed(0)
    images, labels = images_of(name), np.array([1, 2, 3, 1])
    expected = build(name).predict_on_batch(images)
    trainer = tfpar.Trainer(lambda: build(name), tfpar.Pipeline(num_stages, 2, balance="parameters"), seed=0)
    found = trainer.predict(images, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    before = trainer.model.get_weights()
    [loss] = trainer.fit(images, labels, batch_size=4, verbose=0).history["loss"]
    assert np.isfinite(loss), f"{name} in {num_stages} stages: the loss is {loss}"
    moved = [not np.array_equal(*pair) for pair in zip(before, trainer.model.get_weights(), strict=True)]
    assert any(moved), f"{name} in {num_stages} stages: no weight moved"
    seconds = time.process_time() - began
    return (
        f"{num_stages} stages, loss {loss:.3f}, {sum(moved)} of {len(moved)} weights moved, {seconds:.0f} s of CPU time"
    )


def main() -> None:
    """Check and run the architectures that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; none for all")
    parser.add_argument("--from", dest="first", metavar="NAME", help="begin with this one, in alphabetical order")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="instead of 2, 4 and 8")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no other one after so long")
    given = parser.parse_args()
    tfpar.use_logical_cpus(8)
    began = time.monotonic()
    for name in given.names or [name for name in all_names() if name >= (given.first or "")]:
        if time.monotonic() - began > 60 * given.minutes:
            print(f"Resume with --from {name}")
            break
        print(f"{name}: {check(name)}", flush=True)
        for num_stages in given.stages:
            print(f"{name}: {run(name, num_stages)}", flush=True)
            keras.utils.clear_session()


if __name__ == "__main__":
    main()

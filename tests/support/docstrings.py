"""The examples of docstrings: their places, the names that they use, and their execution.

An example may use names of its module, and those of `ASSUMED`: a model function, a dataset, a trainer and so on. It is
compared with what it says it prints; where it says nothing, nothing is compared (`trainer.fit` shows its progress).
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import ROOT

PARSER = doctest.DocTestParser()
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Docstring(NamedTuple):
    """A docstring with examples.

    Attributes:
        module: Such as `tfpar.data.load`.
        name: What it describes, such as `Trainer.fit`; empty for the module.
        text: The docstring.
        line: Where it begins in its file.
    """

    module: str
    name: str
    text: str
    line: int


# In a job of two workers, in the same order on both.
IN_A_JOB = ("Group", "MultiWorker")
# In a new process, in this order: the first must come before TensorFlow's threads, the second before its devices.
IN_A_PROCESS = ("use_logical_cpus", "Mirrored", "Pipeline")


def collect() -> Iterator[Docstring]:
    """Find every docstring of the library that has an example, without importing it."""
    for folder, package in ((ROOT / "tfpar", "tfpar"), (ROOT / "trainers", "tfpar.trainers")):
        for path in sorted(folder.rglob("*.py")):
            module = ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
            yield from _of(ast.parse(path.read_text(encoding="utf-8")), module, "")


def called(*names: str) -> list[Docstring]:
    """Return the docstrings of classes and functions of these names, in the order of the names."""
    return [one for name in names for one in collect() if one.name == name]


def _of(node: ast.AST, module: str, name: str) -> Iterator[Docstring]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and PARSER.get_examples(text):
            yield Docstring(module, name, text, getattr(node, "lineno", 1))
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", "") if isinstance(child, ast.ClassDef | ast.FunctionDef) else ""
        yield from _of(child, module, f"{name}.{inner}" if name and inner else inner or name)


def run(docstring: Docstring) -> str:
    """Run the examples of a docstring in their order; return the failures as text, empty without any."""
    module = importlib.import_module(docstring.module)
    names = {**_assumed(docstring), **vars(module), "__name__": "__main__"}
    test = PARSER.get_doctest(docstring.text, names, f"{docstring.module}.{docstring.name}", None, docstring.line)
    report = io.StringIO()
    with _restored_streams(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = doctest.DocTestRunner(_Silent(), verbose=False, optionflags=OPTIONS)
        runner.run(test, out=report.write)
    return report.getvalue()


class _Silent(doctest.OutputChecker):
    """Compares an output only where the example has one."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@contextlib.contextmanager
def _restored_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _assumed(docstring: Docstring) -> dict[str, Any]:
    """Create the names that the examples use, but neither define nor find in their module."""
    sources = "".join(example.source for example in PARSER.get_examples(docstring.text))
    named = [node for node in ast.walk(ast.parse(sources)) if isinstance(node, ast.Name)]
    made = {node.id for node in named if isinstance(node.ctx, ast.Store)}
    used = {node.id for node in named} - made
    is_of_pipeline = "planned" in sources or "preview" in sources
    assumed = {**ASSUMED, "trainer": _pipeline, "strategy": _pipeline_strategy} if is_of_pipeline else ASSUMED
    return {name: make() for name, make in assumed.items() if name in used}


# The names that examples may use without defining them.


def build_model() -> Any:
    """A classifier of rows of four numbers, whose first layer is called features."""
    import keras

    layers = [keras.layers.Dense(4, "relu", name="features"), keras.layers.Dense(3, name="base")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def _images() -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


@functools.cache
def _dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((_images(), [0, 1, 2] * 8)).batch(8)


@functools.cache
def _trainer() -> Any:
    """Return one trainer for all examples."""
    import tfpar

    return tfpar.Trainer(build_model, tfpar.SingleDevice("CPU:0"))


@functools.cache
def _pipeline() -> Any:
    """Return a trainer whose step is predicted."""
    import tfpar

    return tfpar.Trainer(build_model, tfpar.Pipeline(2, num_microbatches=2, devices=["CPU:0", "CPU:1"]))


def _pipeline_strategy() -> Any:
    return _pipeline().strategy


def _module(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


def _claimed() -> Any:
    from tfpar.runs.directory import RunDirectory

    return RunDirectory("runs/watched")


def _callback(name: str, *arguments: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("tfpar"), name)(*arguments)


ASSUMED: dict[str, Callable[[], Any]] = {
    **{name: _module(name) for name in ("keras", "tfpar", "socket")},
    "np": _module("numpy"),
    "tf": _module("tensorflow"),
    "build_model": lambda: build_model,
    "images": _images,
    "dataset": _dataset,
    "validation": _dataset,
    "model": build_model,
    "other": build_model,
    "batch": _images,
    "part_of_batch": lambda: _images()[:12],
    "kernel": _images,
    "trainer": _trainer,
    "directory": _claimed,
    "checkpoints": _callback("Checkpoints", "watched/checkpoints"),
    "metrics_file": _callback("MetricsFile", "watched/metrics.jsonl"),
    "path": lambda: Path("content"),
    "content": lambda: b"content",
    "group": lambda: 0,
}

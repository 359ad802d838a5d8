"""Private names of Keras and TensorFlow that tfpar touches: each exists, and each is listed in `private_names`.

After an upgrade, the tests that fail are the list of what to look at.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.ops import numpy as operations
from keras.src.trainers import data_adapters
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from tests.support.private_names import NO_ATTRIBUTES, ROWS, Row
from tfpar._compat import keras_lazy_imports, tf_server

ROOT = next(parent for parent in Path(__file__).parents if (parent / "setup.cfg").exists())
SITE_PACKAGES = {
    name: Path(importlib.util.find_spec(name).origin).parent.parent  # type: ignore[union-attr,arg-type]
    for name in ("keras", "tensorflow")
}
PRIVATE_MODULES = ("keras.src.", "tensorflow.python.", "tensorflow.compiler.", "tensorflow.core.")
STANDARD_LIBRARY = {"_exit", "_getframe", "_replace"}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.ones([2, 3], "float32"), np.ones([2, 1], "float32")


@functools.cache
def model() -> keras.Model:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def seeded_context() -> Any:
    tf.random.set_seed(1)
    return context.context()


# Objects that have an attribute only once they are made, or used.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "a model": model,
    "compiled metrics": lambda: model()._compile_metrics,
    "a compiled loss": lambda: model()._compile_loss,
    "a layer": lambda: model().layers[-1],
    "a variable": lambda: model().weights[0],
    "an optimizer": lambda: model().optimizer,
    "an optimizer of scaled losses": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    "several optimizers": lambda: keras.optimizers.MultiOptimizer(lambda weight: keras.optimizers.SGD()),
    "a Sequential model": lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
    "a metric": keras.metrics.Mean,
    "a metric of a function": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
    "probabilities": lambda: keras.activations.softmax(keras.ops.ones((1, 2))),
    "a tape": tf.GradientTape,
    "a reshaping operation": lambda: operations.Reshape((1,)),
    "a broadcasting operation": lambda: operations.BroadcastTo((1,)),
    "the adapter of a PyDataset": lambda: data_adapters.get_data_adapter(Batches()),
    "the workers of a PyDataset": lambda: data_adapters.get_data_adapter(Batches(workers=2)).enqueuer,
    "the adapter of a generator": lambda: data_adapters.get_data_adapter(Batches()[0] for _ in range(1)),
    "a callback": keras.callbacks.Callback,
    "a TensorBoard callback": lambda: keras.callbacks.TensorBoard(profile_batch=0),
    "TensorFlow's context": seeded_context,
    "a replica's context": tf.distribute.get_replica_context,
    "a tf.function": lambda: tf.function(lambda: tf.constant(1)),
    "a graph": lambda: tf.function(lambda: tf.constant(1)).get_concrete_function().graph,
    "a gradient's registration": lambda: ops.RegisterGradient("CustomGradient-example"),
    "the registry of gradients": lambda: ops.gradient_registry,
}


def owner_of(row: Row) -> Any:
    """The object, class or module that a row names."""
    if row.owner in EXAMPLES:
        return EXAMPLES[row.owner]()
    module, _, name = row.owner.rpartition(".")
    try:
        return importlib.import_module(row.owner)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("row", "name"), [pytest.param(row, name, id=f"{row.owner} {name}") for row in ROWS for name in row.names.split()]
)
def test_a_private_name_exists(row: Row, name: str, logical_cpus: list[str]) -> None:
    if row.since > tuple(map(int, keras.__version__.split(".")[:2])):
        pytest.skip(f"a name of Keras {row.since[0]}.{row.since[1]}")
    explanation = f"{row.versions}, {row.link}, needed for: {row.reason}"
    source = (SITE_PACKAGES[row.file.split("/")[0]] / row.file).read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", source), f"{row.file} has no {name}. {explanation}"
    if row.owner:  # else an attribute of an object that is not made here
        owner = owner_of(row)
        exists = hasattr(owner, name) or importlib.util.find_spec(f"{row.owner}.{name}") is not None
        assert exists, f"{row.owner} has no {name}. {explanation}"


def test_the_layer_call_around_an_operation_has_its_key() -> None:
    source = (SITE_PACKAGES["keras"] / "keras/src/layers/layer.py").read_text(encoding="utf-8")
    assert 'global_state.get_global_attribute("current_call_ctx")' in source


def test_modules_that_load_late_exist() -> None:
    assert all(importlib.util.find_spec(name) for name in keras_lazy_imports.LATE)


@pytest.mark.skipif(sys.platform != "linux", reason="TensorFlow's libraries have other names")
def test_tensorflows_library_has_the_function_that_starts_its_server() -> None:
    assert tf_server._unlocked() is not None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and len(name) > 1


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a file defines itself."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    return defined | stored | attributes


def touched(source: str) -> Iterator[str]:
    """Private names of Keras and TensorFlow that a file touches: `_name`, or `keras.src.module.name`."""
    tree = ast.parse(source)
    own, modules = own_names(tree), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PRIVATE_MODULES):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PRIVATE_MODULES))
    for node in ast.walk(tree):
        pair = (None, None)
        if isinstance(node, ast.Attribute):
            pair = node.value, node.attr
        elif isinstance(node, ast.Call | ast.Tuple):  # mock.patch.object(module, "name", …), (module, "name", …)
            parts = node.args if isinstance(node, ast.Call) else node.elts
            if len(parts) > 1 and isinstance(parts[1], ast.Constant) and isinstance(parts[1].value, str):
                pair = parts[0], parts[1].value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            pair = None, node.value
        owner, name = pair
        if isinstance(owner, ast.Name) and owner.id in modules:
            yield f"{modules[owner.id]}.{name}"
        elif name is not None and is_private(name) and name not in own and not name.startswith("_tfpar"):
            yield name


def unlisted(source: str) -> list[str]:
    """Names that a file touches and no row lists."""
    names = {name for row in ROWS for name in row.names.split()} | NO_ATTRIBUTES | STANDARD_LIBRARY
    dotted = {f"{row.owner}.{name}" for row in ROWS for name in row.names.split()}
    owners = " ".join(f"{row.owner}." for row in ROWS)
    return sorted(
        name
        for name in set(touched(source))
        if not (name in names | dotted or ("." in name and f"{name}." in owners) or name.endswith("__"))
        # An attribute with an underscore is listed once, of whichever base class.
        and not (is_private(last := name.rpartition(".")[2]) and last in names)
    )


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "tfpar").rglob("*.py")) if "_compat" in path.parts],
    ids=lambda path: path.stem,
)
def test_every_private_name_that_compat_touches_is_listed(path: Path) -> None:
    missing = unlisted(path.read_text(encoding="utf-8"))
    assert not missing, f"give {missing} a row in tests/support/private_names.py"


def test_nothing_else_touches_private_names() -> None:
    for path in [*(ROOT / "tfpar").rglob("*.py"), *(ROOT / "trainers").rglob("*.py")]:
        if "_compat" not in path.parts:
            found = unlisted_elsewhere(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)} touches {found}: let a function of tfpar/_compat do so"


def unlisted_elsewhere(source: str) -> list[str]:
    """Attributes and imports that are private upstream; strings in other files are names of our own."""
    listed = {name for row in ROWS for name in row.names.split() if is_private(name)}
    return sorted(name for name in set(touched(source)) if name.startswith(PRIVATE_MODULES) or name in listed)


def test_the_search_finds_every_way_to_touch_a_name() -> None:
    source = """
from unittest import mock
from keras.src.losses import loss as loss_module
import tensorflow.python.eager
class Own:
    def __init__(self):
        self._own = self._other()
def touch(model):
    loss_module.first()
    mock.patch.object(loss_module, "second", None)
    model._third = getattr(model, "_fourth", None)
    return model._own, model._tfpar_notes, [(loss_module, "fifth")]
"""
    loss = "keras.src.losses.loss"
    assert set(touched(source)) == {
        *(loss, f"{loss}.first", f"{loss}.second", f"{loss}.fifth"),
        *("tensorflow.python.eager", "_third", "_fourth"),
    }

"""The check of parity: a model trained under a strategy, compared with plain Keras on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

from tfpar import comparable
from tfpar._compat.random_numbers import random_state
from tfpar.files import atomic_file
from tfpar.full_precision import full_precision
from tfpar.loops.model_function import check_arguments
from tfpar.messages import keyword_arguments
from tfpar.strategies import Strategy, resolve
from tfpar.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Difference:
    """The relative difference of a weight, or of an entry of the logs, between a strategy and one device.

    Args:
        name: Path of the weight, or name in the logs.
        after_first_step: Difference after the first step; NaN for logs.
        after_last_step: Difference after the last step.
    """

    name: str
    after_first_step: float
    after_last_step: float


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of `check_parity`.

    Args:
        strategy: Description of the strategy.
        num_steps: Number of steps.
        tolerance: Largest relative difference that counts as equal.
        weights: Differences of the weights, in the order of the model.
        logs: Differences of the loss and of each metric.
        precision: The float type of both trainings.
        switched_off: Names of the layers whose random numbers or batch statistics were switched off in both trainings,
            because they differ by design.
    """

    strategy: str
    num_steps: int
    tolerance: float
    weights: tuple[Difference, ...]
    logs: tuple[Difference, ...]
    precision: comparable.Precision = comparable.FLOAT64
    switched_off: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all weights and logs are within the tolerance."""
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The name of the first weight that differs after the first step, else of a weight or log after the last.

        None if all are within the tolerance.
        """
        early = [entry.name for entry in self.weights if not entry.after_first_step <= self.tolerance]
        late = [entry.name for entry in (*self.weights, *self.logs) if not entry.after_last_step <= self.tolerance]
        return next(iter([*early, *late]), None)

    @property
    def conditions(self) -> str:
        """A clause with the float type of both trainings and the layers that were switched off."""
        names = comparable.switched_off_clause(self.switched_off)
        return f"in {self.precision.describe()}{', ' if names else ''}{names}"

    def save(self, path: str | Path) -> None:
        """Write the report as JSON. The report page of a run includes `parity.json` from its folder.

        Args:
            path: The file, in an existing folder; an existing file is replaced.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "parity.json"
            >>> ParityReport("Mirrored", 20, 1e-9, (), ()).save(path)
            >>> path.exists()
            True
        """
        # Logs have NaN after the first step, which JSON lacks.
        entries = {name: [_without_nan(entry) for entry in getattr(self, name)] for name in ("weights", "logs")}
        table = {"strategy": self.strategy, "num_steps": self.num_steps, "tolerance": self.tolerance}
        verdict = {"equal": self.equal, "conditions": self.conditions}
        atomic_file.write(Path(path), json.dumps({**table, **verdict, **entries}, indent=2) + "\n")

    def table(self) -> rich.table.Table:
        """Return the report as a table for `rich.print`."""
        verdict = "equal to one device" if self.equal else f"differs first in {self.first_difference}"
        table = rich.table.Table(
            title=f"{self.strategy}: {verdict}",
            caption=f"relative differences after 1 and {self.num_steps} steps, tolerance {self.tolerance:g} "
            f"{self.conditions}",
        )
        for column in ("", "after 1 step", f"after {self.num_steps} steps", ""):
            table.add_column(column, justify="left" if not column else "right")
        for entry in (*self.weights, *self.logs):
            first = "" if np.isnan(entry.after_first_step) else f"{entry.after_first_step:.1e}"
            is_equal = entry.after_last_step <= self.tolerance and not entry.after_first_step > self.tolerance
            mark = "" if is_equal else "differs"
            table.add_row(entry.name, first, f"{entry.after_last_step:.1e}", mark)
        return table


def _without_nan(entry: Difference) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in dataclasses.asdict(entry).items()}


@random_state.preserved_random_state()
@keyword_arguments.named
def check_parity(
    build_model: Callable[[], keras.Model],
    dataset: tf.data.Dataset,
    strategy: Strategy,
    *,
    num_steps: int = 20,
    seed: int = 0,
    dtype: str = "float64",
    verbose: int = 1,
) -> ParityReport:
    """Train a model with Keras' `fit` on one device and again under a strategy, and compare weights and logs.

    The tolerance is 1e-9 in float64, where rounding cannot exceed it, and 1e-5 in float32. A model with layers or
    metrics that require float32 is compared in float32, without TensorFloat-32 on GPUs.

    Random layers such as Dropout, and BatchNormalization unless synchronized, differ by design if the strategy splits
    batches. Both trainings then run without random numbers and with moving statistics, and the report names these
    layers. Global random state is preserved.

    Args:
        build_model: The model function, as for `tfpar.Trainer`.
        dataset: Global batches, of which both trainings use the first `num_steps`, in the same order.
        strategy: The strategy to check.
        num_steps: Number of steps, at least 1.
        seed: Seed of the weights.
        dtype: "float64", or "float32" to compare in float32 in any case.
        verbose: 1 prints the table, 0 nothing.

    Returns:
        The differences of all weights and logs.

    Raises:
        TypeError: If an argument has the wrong type, or the model function returns the same model twice.
        ValueError: If an argument is out of range, or the strategy refuses the model.

    Example:
        >>> report = tfpar.check_parity(build_model, dataset, tfpar.Mirrored())
        >>> report.equal, report.first_difference
        (True, None)
    """
    check_arguments(build_model, strategy, seed)
    strategy = resolve(strategy)
    if isinstance(build_model, keras.Model):
        raise TypeError(
            "check_parity trains a model on one device and another one under the strategy: pass the function that "
            "builds them, not a model."
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"check_parity takes a tf.data.Dataset of global batches, received {type(dataset).__name__}. Write "
            "tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(32)."
        )
    if dtype not in comparable.TOLERANCES or num_steps < 1:
        raise ValueError(
            f"dtype must be one of {list(comparable.TOLERANCES)} and num_steps at least 1, received dtype={dtype!r} "
            f"and num_steps={num_steps}."
        )
    batches = list(dataset.take(num_steps))
    if not batches:
        raise ValueError("check_parity needs at least one batch, and the dataset is empty.")
    run = functools.partial(_on_one_device, build_model, batches, strategy, seed)
    reference, (expected, expected_logs, switched_off), precision = comparable.trained(run, dtype)
    with _floatx(precision.dtype), full_precision():
        trainer = Trainer(build_model, strategy, seed)
        if trainer.model is reference:
            raise TypeError(
                "A model function must return a new model each time it is called, and this one returned the same model "
                "twice. Create the model inside of it."
            )
        actual = _FirstStep()
        with comparable.without_differences_by_design(strategy):
            logs = trainer.fit(_repeatable(batches, precision.dtype), verbose=0, callbacks=[actual]).history
    report = ParityReport(
        strategy.describe(),
        len(batches),
        comparable.TOLERANCES[precision.dtype],
        tuple(
            Difference(variable.path, first, last)
            for variable, first, last in zip(
                reference.weights,
                weight_differences(actual.weights, expected.weights),
                weight_differences(trainer.model.get_weights(), reference.get_weights()),
                strict=True,
            )
        ),
        tuple(Difference(name, float("nan"), last) for name, last in log_differences(logs, expected_logs).items()),
        precision,
        switched_off,
    )
    if verbose:
        rich.console.Console().print(report.table())
    return report


def _on_one_device(
    build_model: Callable[[], keras.Model], batches: Sequence[Any], strategy: Strategy, seed: int, dtype: str
) -> tuple[keras.Model, tuple[_FirstStep, dict[str, Any], tuple[str, ...]]]:
    """Train with Keras' `fit`; return the model, its first step, its logs and the names of switched-off layers."""
    first_step = _FirstStep()
    with _floatx(dtype), full_precision():
        keras.utils.set_random_seed(seed)
        model = build_model()
        with comparable.without_differences_by_design(strategy) as switched_off:
            history = model.fit(_repeatable(batches, dtype), verbose=0, shuffle=False, callbacks=[first_step]).history
    return model, (first_step, history, tuple(switched_off))


def _repeatable(batches: Sequence[Any], dtype: str) -> tf.data.Dataset:
    datasets = [tf.data.Dataset.from_tensors(_cast(batch, dtype)) for batch in batches]
    return functools.reduce(tf.data.Dataset.concatenate, datasets)


def log_differences(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of each entry that both histories have.

    Names are compared without the numbers that Keras appends to repeated names of metrics. Entries may be missing if a
    model with objectives has its own `train_step` for Keras.

    Args:
        actual: The history under a strategy.
        expected: The history on one device.

    Example:
        >>> log_differences({"loss": [0.5], "auc_1": [1.0]}, {"loss": [0.25], "auc": [1.0]})
        {'loss': 1.0, 'auc': 0.0}
    """
    values = _without_numbers(actual)
    pairs = [(name, value) for name, value in _without_numbers(expected).items() if name in values]
    return {name: relative_difference(np.array(values[name]), np.array(value)) for name, value in pairs}


def _without_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    return {re.sub(r"_\d+$", "", name): values for name, values in logs.items()}


def weight_differences(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> list[float]:
    """Return the relative difference of each weight.

    It is relative to the largest value of the weight, or to a thousandth of the largest of all weights if that is
    more: a weight whose gradient is zero, such as the bias of attention keys, consists of rounding errors.

    Args:
        actual: The weights under a strategy.
        expected: The weights on one device.

    Example:
        >>> weight_differences([np.array([4.0]), np.array([0.002])], [np.array([4.0]), np.array([0.001])])
        [0.0, 0.25]
    """
    min_scale = 1e-3 * max((float(np.abs(weight).max(initial=0.0)) for weight in expected), default=0.0)
    return [relative_difference(*pair, min_scale) for pair in zip(actual, expected, strict=True)]


def relative_difference(actual: np.ndarray, expected: np.ndarray, min_scale: float = 0.0) -> float:
    """Return the largest difference of two arrays, relative to the largest absolute value in `expected`.

    Args:
        actual: Array of any shape.
        expected: Array of the same shape.
        min_scale: The difference is relative to this value if it is larger.

    Example:
        >>> relative_difference(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
        0.2
    """
    difference = np.abs(np.asarray(actual, "float64") - np.asarray(expected, "float64")).max(initial=0.0)
    scale = max(np.abs(np.asarray(expected, "float64")).max(initial=0.0), min_scale)
    return float(difference / scale) if scale > 0 else float(difference)


class _FirstStep(keras.callbacks.Callback):
    """Callback that stores the weights after the first step."""

    single_batches = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.weights = self.model.get_weights()
            self.single_batches = False


@contextlib.contextmanager
def _floatx(dtype: str) -> Iterator[None]:
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


def _cast(batch: Any, dtype: str) -> Any:
    return tf.nest.map_structure(lambda tensor: tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor, batch)

"""The JSON part of a checkpoint: written, and validated when it is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpar.checkpoint import part_files
from tfpar.checkpoint.callback_state import extract_arrays, insert_arrays
from tfpar.checkpoint.file_format import PART_FILES, STATE, DamagedError, Predicate, Stored, decode_partly, encode

_REPLICAS = "replicas/"
_LARGEST = 2**63 - 1  # of TensorFlow's integers


_NOT_IN_OLDER_FILES = {"steps_per_epoch", "batch_size"}


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run: its epoch and step, and its place in the training data.

    Args:
        epoch: Completed epochs.
        step: Completed steps of the current epoch.
        passes: Passes over the dataset before the current one.
        batches: Global batches read in the current pass.
        stopped: Whether a callback has ended the training.
        steps_per_epoch: Steps of the current epoch; 0 if the epoch ends with data of unknown length, and in files of
            older versions.
        batch_size: Examples of the first global batch of a pass; 0 in files of older versions.
    """

    epoch: int = 0
    step: int = 0
    passes: int = 0
    batches: int = 0
    stopped: bool = False
    steps_per_epoch: int = 0
    batch_size: int = 0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and validated.

    Args:
        arrays: State variables by name, as `np.ndarray`, or as `HeldArray` in the process that needs them.
        parts: Metric variables of each replica, `[replicas, ...]`, by name.
        step: Updates of the optimizer; None in files of older versions.
        position: The position of the run.
        callbacks: JSON values and arrays, as `callback_state.read` returns them.
        run: The identity of the run that wrote it; "" in files of older versions.
        stored: The places of state variables that stay in a file until their holders read them, by name.
        has_part_files: Whether a part of it is in other files.
    """

    arrays: dict[str, Any]
    parts: dict[str, np.ndarray]
    step: int | None
    position: Position
    callbacks: dict[str, Any]
    run: str
    stored: dict[str, Stored] = dataclasses.field(default_factory=dict)
    has_part_files: bool = False


def pack(
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, np.ndarray],
    step: int,
    position: Position,
    callbacks: dict[str, Any],
    run: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the JSON of a checkpoint's file; arrays of callbacks are copied.

    Args:
        arrays: State variables by name, already copied.
        parts: Metric variables of each replica, `[replicas, ...]`, by name, already copied.
        step: Updates of the optimizer.
        position: The position of the run.
        callbacks: JSON values and arrays, as `callback_state.read` returns them.
        run: The identity of the run.
    """
    extracted: dict[str, np.ndarray] = {}
    of_replicas = {_REPLICAS + name: values for name, values in parts.items()}
    state = {
        "step": step,
        "run": run,
        "position": dataclasses.asdict(position),
        "callbacks": extract_arrays(callbacks, extracted),
        "num_arrays": len(arrays) + len(of_replicas) + len(extracted),
    }
    copies = {name: array.copy() for name, array in extracted.items()}
    return {**arrays, **of_replicas, **copies}, state


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as the bytes of one file.

    Args:
        checkpoint: One whose arrays are all in this process.
    """
    arrays, state = pack(
        checkpoint.arrays,
        checkpoint.parts,
        int(checkpoint.step or 0),
        checkpoint.position,
        checkpoint.callbacks,
        checkpoint.run,
    )
    return encode([*arrays.items(), (STATE, np.array(json.dumps(state)))])


def unpack(source: Path | bytes, stays: Predicate = lambda name: False) -> Checkpoint:
    """Read and validate a checkpoint.

    Args:
        source: A file, or its bytes.
        stays: Whether a state variable may stay in its file, by its name; it is then in `stored`.

    Raises:
        DamagedError: If it is damaged or no checkpoint.
        OSError: If the file cannot be opened.
    """
    groups = ("weights/", "optimizer/", "metrics/")
    arrays, stored = decode_partly(source, lambda name: name.startswith(groups) and stays(name))
    try:
        state = json.loads(str(arrays.pop(STATE)))
    except KeyError:
        raise DamagedError(f"it lacks {STATE}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its {STATE} is not JSON") from error
    if not isinstance(state, dict):
        raise DamagedError(f"its {STATE} is not an object")
    # One flipped bit in the zip's directory can hide members. Older files have no number.
    num_arrays = len(arrays) + len(stored)
    if num_arrays != state.get("num_arrays", num_arrays):
        raise DamagedError(f"it has {num_arrays} arrays, and was written with another number")
    if state.get(PART_FILES):
        _add_parts(source, state, stays, arrays, stored)
    finite = {name: array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for name, array in arrays.items()}
    finite |= {name: place.is_finite for name, place in stored.items()}
    for name, is_finite in finite.items():
        if name.startswith("weights/") and not is_finite:
            raise DamagedError(f"{name[:60]} is not finite")  # never written by a run
    step, run = state.get("step"), state.get("run", "")
    if step is not None and not _is_number(step):
        raise DamagedError(f"its step is {step!r:.40}")
    if not isinstance(run, str):
        raise DamagedError(f"its run is {run!r:.40}")
    others = ("callbacks/", _REPLICAS)
    return Checkpoint(
        {name: array for name, array in arrays.items() if not name.startswith(others)},
        {name.removeprefix(_REPLICAS): array for name, array in arrays.items() if name.startswith(_REPLICAS)},
        step,
        _position(state.get("position")),
        _callbacks(state.get("callbacks"), arrays),
        run,
        stored,
        bool(state.get(PART_FILES)),
    )


def _add_parts(
    source: Path | bytes,
    state: dict[str, Any],
    stays: Predicate,
    arrays: dict[str, np.ndarray],
    stored: dict[str, Stored],
) -> None:
    if isinstance(source, bytes):
        raise DamagedError("its parts are in other files")
    of_parts, stored_in_parts = part_files.unpack(source, state, stays)
    if twice := {*of_parts, *stored_in_parts} & {*arrays, *stored}:
        raise DamagedError(f"it has two arrays {min(twice)[:40]!r}")
    arrays.update(of_parts)
    stored.update(stored_in_parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _position(values: Any) -> Position:
    fields = {field.name for field in dataclasses.fields(Position)}
    if not isinstance(values, dict) or not fields - _NOT_IN_OLDER_FILES <= {*values} <= fields:
        raise DamagedError(f"its position is {values!r:.40}")
    for name, value in values.items():
        if not (isinstance(value, bool) if name == "stopped" else _is_number(value)):
            raise DamagedError(f"its position has {name} = {value!r:.40}")
    return Position(**values)


def _callbacks(values: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(one, dict) for one in values.values()):
        raise DamagedError("it has no state of callbacks")
    try:
        found: dict[str, Any] = insert_arrays(values, arrays)
    except KeyError as error:
        raise DamagedError(f"it lacks the array {error}"[:100]) from error
    except (TypeError, ValueError) as error:
        raise DamagedError(f"its state of callbacks cannot be read: {error}"[:100]) from error
    return found

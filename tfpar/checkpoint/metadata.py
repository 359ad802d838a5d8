"""The JSON of a checkpoint, which is validated when it is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tfpar.checkpoint import part_files
from tfpar.checkpoint.callback_state import extract_arrays, insert_arrays
from tfpar.checkpoint.file_format import PART_FILES, STATE, DamagedError, Predicate, Stored, decode_partly, encode

_REPLICAS = "replicas/"
_LARGEST = 2**63 - 1  # of TensorFlow's integers


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a run in its epochs and in the data.

    Args:
        epoch: Completed epochs.
        step: Completed steps of the current epoch.
        passes: Completed passes over the dataset.
        batches: Global batches read in the current pass.
        stopped: Whether a callback has ended the training.
        steps_per_epoch: Steps of the current epoch; 0 if unknown.
        batch_size: Examples in the first global batch of a pass; 0 if unknown.
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
    """A validated checkpoint.

    Args:
        arrays: State variables by name, as `np.ndarray` or, in the memory of another process, `RemoteArray`.
        replica_metrics: Metric variables of all replicas, `[replicas, ...]`, by name.
        step: Number of optimizer updates.
        position: The position of the run.
        callbacks: The state of callbacks, from `callback_state.read`.
        run: The identity of the run.
        stored: The locations of state variables that other processes still have to read, by name.
        has_part_files: Whether it has part files.
    """

    arrays: dict[str, Any]
    replica_metrics: dict[str, np.ndarray]
    step: int
    position: Position
    callbacks: dict[str, Any]
    run: str
    stored: dict[str, Stored] = dataclasses.field(default_factory=dict)
    has_part_files: bool = False


def pack(
    arrays: Mapping[str, np.ndarray],
    replica_metrics: Mapping[str, np.ndarray],
    step: int,
    position: Position,
    callbacks: dict[str, Any],
    run: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the JSON of a checkpoint file, from the fields of a `Checkpoint`.

    Only the arrays of callbacks are copied.
    """
    extracted: dict[str, np.ndarray] = {}
    by_replica = {_REPLICAS + name: values for name, values in replica_metrics.items()}
    state = {
        "step": step,
        "run": run,
        "position": dataclasses.asdict(position),
        "callbacks": extract_arrays(callbacks, extracted),
        "num_arrays": len(arrays) + len(by_replica) + len(extracted),
    }
    copies = {name: array.copy() for name, array in extracted.items()}
    return {**arrays, **by_replica, **copies}, state


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint, whose arrays must all be in this process, as the bytes of one file."""
    arrays, state = pack(
        checkpoint.arrays,
        checkpoint.replica_metrics,
        checkpoint.step,
        checkpoint.position,
        checkpoint.callbacks,
        checkpoint.run,
    )
    return encode([*arrays.items(), (STATE, np.array(json.dumps(state)))])


def unpack(source: Path | bytes, stays: Predicate = lambda name: False) -> Checkpoint:
    """Read and validate a checkpoint.

    Args:
        source: A file, or its bytes.
        stays: Whether the state variable of a name may stay in its file; its location is then in `stored`.

    Raises:
        DamagedError: If it is damaged or not a checkpoint.
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
    num_arrays = len(arrays) + len(stored)
    if num_arrays != state.get("num_arrays"):  # a flipped bit in the zip's directory can hide members
        raise DamagedError(f"it has {num_arrays} arrays, and was written with another number")
    if state.get(PART_FILES):
        _add_parts(source, state, stays, arrays, stored)
    finite = {name: array.dtype.kind not in "fc" or bool(np.isfinite(array).all()) for name, array in arrays.items()}
    finite |= {name: location.is_finite for name, location in stored.items()}
    for name, is_finite in finite.items():
        if name.startswith("weights/") and not is_finite:
            raise DamagedError(f"{name[:60]} is not finite")  # never written by a run
    step, run = state.get("step"), state.get("run")
    if not _is_number(step):
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
    part_arrays, part_stored = part_files.unpack(source, state, stays)
    if repeated := {*part_arrays, *part_stored} & {*arrays, *stored}:
        raise DamagedError(f"it has two arrays {min(repeated)[:40]!r}")
    arrays.update(part_arrays)
    stored.update(part_stored)


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _position(values: Any) -> Position:
    fields = {field.name for field in dataclasses.fields(Position)}
    if not isinstance(values, dict) or {*values} != fields:
        raise DamagedError(f"its position is {values!r:.40}")
    for name, value in values.items():
        if not (isinstance(value, bool) if name == "stopped" else _is_number(value)):
            raise DamagedError(f"its position has {name} = {value!r:.40}")
    return Position(**values)


def _callbacks(values: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    if not isinstance(values, dict) or not all(isinstance(attributes, dict) for attributes in values.values()):
        raise DamagedError("it has no state of callbacks")
    try:
        callbacks: dict[str, Any] = insert_arrays(values, arrays)
    except KeyError as error:
        raise DamagedError(f"it lacks the array {error}"[:100]) from error
    except (TypeError, ValueError) as error:
        raise DamagedError(f"its state of callbacks cannot be read: {error}"[:100]) from error
    return callbacks

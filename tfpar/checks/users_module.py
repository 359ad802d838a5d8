"""Imports a user's script for its functions, in a process where the doctor has chosen devices and float types."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tfpar.messages.received import quoted


@functools.cache  # once for the model function and the data
def imported(place: str) -> Any:
    """Import a module or a file.

    What it sets about devices and threads is ignored: TensorFlow already runs here, on those of the doctor.

    Args:
        place: "file.py" or "package.module".

    Raises:
        ValueError: If there is no such file.
        RuntimeError: If the module trains, or calls the doctor, outside of its functions.
    """
    with _without_settings_of_devices(), _without_training(place):
        return _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)


def _module_of_file(path: Path) -> Any:
    # As a script's own folder is when Python runs it; its name is not "__main__", so that it does not train.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_user", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"There is no file {quoted(str(path))}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _without_settings_of_devices() -> Iterator[None]:
    import tensorflow as tf

    settings = (
        (tf.config, ("set_logical_device_configuration", "set_visible_devices")),
        (tf.config.experimental, ("set_memory_growth", "set_virtual_device_configuration", "set_visible_devices")),
        (tf.config.threading, ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads")),
    )
    with contextlib.ExitStack() as stack:
        for owner, names in settings:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, return_value=None))
        yield


@contextlib.contextmanager
def _without_training(place: str) -> Iterator[None]:
    """Refuse what a script without `if __name__ == "__main__":` would do on import, such as save its model."""
    import keras

    import tfpar
    from tfpar.checks import examination

    refusal = RuntimeError(
        f"The doctor imports {quoted(Path(place).name)} for its functions, and would train, or call the doctor, again. "
        'Put these calls under `if __name__ == "__main__":`.'
    )
    with contextlib.ExitStack() as stack:
        for owner, name in ((keras.Model, "fit"), (tfpar.Trainer, "fit"), (examination, "examine")):
            stack.enter_context(mock.patch.object(owner, name, side_effect=refusal))
        yield

"""A filter for TensorFlow's start-up messages. Set TF_CPP_MIN_LOG_LEVEL=0 to see all of them.

TensorFlow 2.21 prints some of them during its import, before it reads TF_CPP_MIN_LOG_LEVEL, so the file descriptor must
be redirected.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.abc
import importlib.machinery
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# TensorFlow's C++ files that report devices and the start of a cluster.
_FILES = (
    "port",
    "cudart_stub",
    "cpu_feature_guard",
    "computation_placer",
    "cuda_dnn",
    "cuda_fft",
    "cuda_blas",
    "coordination_service",
    "coordination_service_agent",
    "grpc_server_lib",
    "generator_dataset_op",
)
_STAMP = r"[\d:. ]+ "
_STARTUP = re.compile(
    rf"[IW]\d{{4}} {_STAMP}({'|'.join(_FILES)})\.(cc|h):\d+\] "
    rf"|E\d{{4}} {_STAMP}cuda_(dnn|fft|blas)\.cc:\d+\] Unable to register "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .*rebuild TensorFlow with the appropriate compiler flags\.$"
)
_NO_DRIVER = re.compile(rf"E\d{{4}} {_STAMP}cuda_platform\.cc:\d+\] failed call to cuInit")
_DEVICES = ("nvidiactl", "nvidia0", "dxg")


def is_startup_message(line: str) -> bool:
    """Return whether a line on standard error is one of TensorFlow's start-up messages.

    A failed call of NVIDIA's driver is one, unless the machine has an NVIDIA device.

    Example:
        >>> is_startup_message("I0000 00:00:1700000000.123456    42 port.cc:153] oneDNN custom operations are on.")
        True
        >>> is_startup_message("E0000 00:00:1700000000.123456    42 gpu_device.cc:10] Out of memory")
        False
    """
    return bool(_STARTUP.match(line)) or (not _has_gpu() and bool(_NO_DRIVER.match(line)))


def wants_all(environment: Mapping[str, str]) -> bool:
    """Return whether the user asks for all messages."""
    return environment.get(LEVEL) == "0"


def install() -> None:
    """Suppress TensorFlow's start-up messages."""
    for is_shown in (_is_not_about_distribution, _is_not_repeated):
        logging.getLogger("tensorflow").addFilter(is_shown)
    if wants_all(os.environ):
        return
    if LEVEL not in os.environ:
        os.environ[LEVEL] = "1"
        _was_set.append(LEVEL)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        sys.meta_path.insert(0, _finder)
    elif hasattr(tensorflow, "config"):
        with without_startup_messages():
            _list_devices(tensorflow)


def uninstall() -> None:
    """Stop suppressing TensorFlow's start-up messages, so that they can be recorded."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _was_set:
        os.environ.pop(_was_set.pop(), None)


def _list_devices(tensorflow: Any) -> None:
    """Trigger TensorFlow's message about a missing driver, which it prints once, while it is suppressed."""
    if not _has_gpu():
        tensorflow.config.list_physical_devices()


def _is_not_about_distribution(record: logging.LogRecord) -> bool:
    """Drop INFO messages of tf.distribute, such as "Reduce to …", which notebooks show."""
    return record.levelno > logging.INFO or "tensorflow/python/distribute" not in Path(record.pathname).as_posix()


def _is_not_repeated(record: logging.LogRecord) -> bool:
    """Show the warning about eager replicas once: TensorFlow 2.21 repeats it in the first five steps."""
    if "eagerly has significant overhead" not in str(record.msg):
        return True
    is_new = record.msg not in _shown
    _shown.add(record.msg)
    return is_new


class _QuietImport(importlib.abc.MetaPathFinder):
    """Suppresses the messages of TensorFlow's import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                with without_startup_messages():
                    execute(module)
                    _list_devices(module)

            loader.exec_module = exec_module
        return spec


_finder = _QuietImport()
_was_set: list[str] = []
_shown: set[str] = set()


@contextlib.contextmanager
def without_startup_messages() -> Iterator[None]:
    """Buffer standard error, and write it at the end of the context without the start-up messages.

    A crash loses the buffer, but Python's fault handler writes to the terminal.
    """
    if not _is_open(2):
        yield
        return
    _flush_errors()
    # Unbuffered, so that closing the file cannot fail after a failed write, as on a full disk.
    with tempfile.TemporaryFile() as buffer, os.fdopen(os.dup(2), "wb", buffering=0) as terminal:
        reports_crashes = not faulthandler.is_enabled()
        if reports_crashes:
            faulthandler.enable(terminal.fileno())
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            _flush_errors()
            os.dup2(terminal.fileno(), 2)
            if reports_crashes:
                faulthandler.disable()
            buffer.seek(0)
            with contextlib.suppress(OSError):
                for line in buffer:
                    if not is_startup_message(line.decode(errors="replace").rstrip("\n")):
                        terminal.write(line)


def _flush_errors() -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:  # None if it was closed at the start of Python
            sys.stderr.flush()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _has_gpu() -> bool:
    return any(Path("/dev", name).exists() for name in _DEVICES)

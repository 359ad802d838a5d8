"""A filter for TensorFlow's start-up messages; all other output is kept.

TensorFlow 2.21 prints a part of them while it is imported, before it reads TF_CPP_MIN_LOG_LEVEL, so only a redirection
of the file descriptor can filter them. Set TF_CPP_MIN_LOG_LEVEL=0 to see all of them.
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
# Files of TensorFlow's C++ code that report the devices of the machine and the forming of a cluster.
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

    On a machine without an NVIDIA device the failed call of its driver is one of them; otherwise it is an error.

    Example:
        >>> is_startup_message("I0000 00:00:1700000000.123456    42 port.cc:153] oneDNN custom operations are on.")
        True
        >>> is_startup_message("E0000 00:00:1700000000.123456    42 gpu_device.cc:10] Out of memory")
        False
    """
    return bool(_STARTUP.match(line)) or (not _has_gpu() and bool(_NO_DRIVER.match(line)))


def wants_all(environment: Mapping[str, str]) -> bool:
    """Return whether the user wants to see all messages."""
    return environment.get(LEVEL) == "0"


def install() -> None:
    """Suppress TensorFlow's start-up messages that are not printed yet."""
    for is_shown in (_is_no_report_of_distribution, _is_no_repetition):
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
            _look_for_devices(tensorflow)


def uninstall() -> None:
    """Stop the suppression of TensorFlow's start-up messages, to record them in a file."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _was_set:
        os.environ.pop(_was_set.pop(), None)


def _look_for_devices(tensorflow: Any) -> None:
    """Trigger TensorFlow's message about a missing driver, which it prints once, where it is suppressed."""
    if not _has_gpu():
        tensorflow.config.list_physical_devices()


def _is_no_report_of_distribution(record: logging.LogRecord) -> bool:
    """Drop INFO messages of tf.distribute such as "Reduce to …", which TensorFlow's logger shows in notebooks."""
    return record.levelno > logging.INFO or "tensorflow/python/distribute" not in Path(record.pathname).as_posix()


def _is_no_repetition(record: logging.LogRecord) -> bool:
    """Show once that a replica runs eagerly: TensorFlow 2.21 warns in each of the first five steps."""
    if "eagerly has significant overhead" not in str(record.msg):
        return True
    is_new = record.msg not in _shown
    _shown.add(record.msg)
    return is_new


class _QuietImport(importlib.abc.MetaPathFinder):
    """Finds TensorFlow, once, and suppresses the messages of its import."""

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
                    _look_for_devices(module)

            loader.exec_module = exec_module
        return spec


_finder = _QuietImport()
_was_set: list[str] = []
_shown: set[str] = set()


@contextlib.contextmanager
def without_startup_messages() -> Iterator[None]:
    """Buffer standard error, and write it at the end without the start-up messages.

    After a crash the buffer is lost, but Python's fault handler still writes to the terminal.
    """
    if not _is_open(2):
        yield
        return
    _flush_errors()
    # Unbuffered: after a failed write, as on a full disk, closing the file must not fail again.
    with tempfile.TemporaryFile() as held, os.fdopen(os.dup(2), "wb", buffering=0) as terminal:
        reports_crashes = not faulthandler.is_enabled()
        if reports_crashes:
            faulthandler.enable(terminal.fileno())
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            _flush_errors()
            os.dup2(terminal.fileno(), 2)
            if reports_crashes:
                faulthandler.disable()
            held.seek(0)
            with contextlib.suppress(OSError):
                for line in held:
                    if not is_startup_message(line.decode(errors="replace").rstrip("\n")):
                        terminal.write(line)


def _flush_errors() -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:  # None if it was closed when Python started
            sys.stderr.flush()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _has_gpu() -> bool:
    return any(Path("/dev", name).exists() for name in _DEVICES)

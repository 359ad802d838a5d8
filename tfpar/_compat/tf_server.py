"""How TensorFlow's server of a job is started, without Python's lock (TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import errors_impl


@contextlib.contextmanager
def starting_without_lock() -> Iterator[None]:
    """Release Python's lock inside this context while TensorFlow starts its server and waits for the other workers.

    TensorFlow 2.21 (`tensorflow/python/tfe_wrapper.cc`, `TFE_EnableCollectiveOps`) holds Python's lock all the time: on
    the chief until the last worker has connected, which is seconds. The same function of TensorFlow's C interface,
    called through ctypes, releases the lock. Its server listens on all addresses of the machine, whatever address
    TF_CONFIG names (`tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc`, `GrpcServer::Init`, adds the port of
    "0.0.0.0"), and has no credentials: it must be confined while it starts.
    """
    with mock.patch.object(pywrap_tfe, "TFE_EnableCollectiveOps", _unlocked() or pywrap_tfe.TFE_EnableCollectiveOps):
        yield


def _unlocked() -> Callable[[Any, bytes], None] | None:
    """Return TensorFlow's C function as Python calls it; None where its library does not offer it."""
    folder = Path(tf.__file__).parent
    try:
        library = ctypes.CDLL(str(folder / "libtensorflow_cc.so.2"))
        framework = ctypes.CDLL(str(folder / "libtensorflow_framework.so.2"))
        enable, new_status = library.TFE_EnableCollectiveOps, framework.TF_NewStatus
        code_of, message_of, delete = framework.TF_GetCode, framework.TF_Message, framework.TF_DeleteStatus
    except (OSError, AttributeError):
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    enable.restype = None
    enable.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    new_status.restype, message_of.restype = ctypes.c_void_p, ctypes.c_char_p
    for function in (code_of, message_of, delete):
        function.argtypes = [ctypes.c_void_p]

    def enable_collective_ops(context_handle: Any, server_def: bytes) -> None:
        status = new_status()
        try:
            enable(pointer_of(context_handle, None), server_def, len(server_def), status)
            code, message = code_of(status), message_of(status).decode(errors="replace")
        finally:
            delete(status)
        if code:
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)

    return enable_collective_ops

"""Start of TensorFlow's server without the GIL (TensorFlow 2.21)."""

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
    """Release the GIL while TensorFlow starts its server and waits for the other workers, in this context.

    TensorFlow 2.21 holds it (`TFE_EnableCollectiveOps` in tensorflow/python/tfe_wrapper.cc), on the chief for seconds,
    until the last worker has connected. The same C function, called through ctypes, releases it. The server listens on
    all addresses, whatever TF_CONFIG says (`GrpcServer::Init` in
    tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc), and has no authentication. So another thread must be
    able to restrict it while it starts.
    """
    with mock.patch.object(pywrap_tfe, "TFE_EnableCollectiveOps", _unlocked() or pywrap_tfe.TFE_EnableCollectiveOps):
        yield


def _unlocked() -> Callable[[Any, bytes], None] | None:
    """Wrap TensorFlow's C function; return None if the library does not export it."""
    folder = Path(tf.__file__).parent
    try:
        library = ctypes.CDLL(str(folder / "libtensorflow_cc.so.2"))
        framework = ctypes.CDLL(str(folder / "libtensorflow_framework.so.2"))
        enable, new_status = library.TFE_EnableCollectiveOps, framework.TF_NewStatus
        get_code, get_message, delete = framework.TF_GetCode, framework.TF_Message, framework.TF_DeleteStatus
    except (OSError, AttributeError):
        return None
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    enable.restype = None
    enable.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    new_status.restype, get_message.restype = ctypes.c_void_p, ctypes.c_char_p
    for function in (get_code, get_message, delete):
        function.argtypes = [ctypes.c_void_p]

    def enable_collective_ops(context_handle: Any, server_def: bytes) -> None:
        status = new_status()
        try:
            enable(get_pointer(context_handle, None), server_def, len(server_def), status)
            code, message = get_code(status), get_message(status).decode(errors="replace")
        finally:
            delete(status)
        if code:
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)

    return enable_collective_ops

"""The program of every worker that tests start: it calls the functions that it receives, one after another.

A function arrives pickled, that is as the name of its module and its own, and the worker imports it. Its result or its
exception goes back.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import keras

import tfpar
from tests.support import tracing
from tests.support.workers import Call, Raised


def outcome(call: Call) -> Any:
    """Return what a function returns, or its exception."""
    keras.config.set_floatx(call.dtype)
    keras.config.set_dtype_policy(call.dtype)
    try:
        return call.function(*call.arguments)
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())


def main(descriptor: int, num_cpus: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    tfpar.use_logical_cpus(num_cpus)
    tracing.with_rare_collections()
    tracing.without_origins()
    channel: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            call = channel.recv()
        except EOFError:  # the job has ended, or the tests' process
            return
        channel.send((call.number, outcome(call)))


def end_with(parent: int) -> None:
    """End this process, which may wait for another one, when that of the tests has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

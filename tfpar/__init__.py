"""tfpar: train a Keras 3 model on many devices with TensorFlow, and get the weights of one device, sooner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpar.commands import start_up

start_up.begin()  # before slow imports

from tfpar._compat import keras_lazy_imports, versions  # noqa: E402
from tfpar.messages import tensorflow_log  # noqa: E402

if TYPE_CHECKING:
    from tfpar.callbacks import LearningRateWarmup, MetricsFile, ReplicaCheck, Throughput
    from tfpar.checkpoint import Checkpoints
    from tfpar.checks.doctor import doctor
    from tfpar.cluster import use_logical_cpus
    from tfpar.drop_in import evaluate, fit, predict
    from tfpar.parity import check_parity
    from tfpar.planning.planner import plan
    from tfpar.reduction.objective import Objective
    from tfpar.reduction.whole_batch import gather
    from tfpar.strategies import (
        Hybrid,
        Mirrored,
        MultiWorker,
        Pipeline,
        SingleDevice,
        Strategy,
        TensorParallel,
        WorkerLostError,
    )
    from tfpar.trainer import Trainer

__version__ = "0.1.0"

# The module of each public name, imported on first use: `import tfpar.config` and planning need no TensorFlow.
_MODULES = {
    "Checkpoints": "checkpoint",
    "Hybrid": "strategies",
    "LearningRateWarmup": "callbacks",
    "MetricsFile": "callbacks",
    "Mirrored": "strategies",
    "MultiWorker": "strategies",
    "Objective": "reduction.objective",
    "Pipeline": "strategies",
    "ReplicaCheck": "callbacks",
    "SingleDevice": "strategies",
    "Strategy": "strategies",
    "TensorParallel": "strategies",
    "Throughput": "callbacks",
    "Trainer": "trainer",
    "WorkerLostError": "strategies",
    "check_parity": "parity",
    "doctor": "checks.doctor",
    "evaluate": "drop_in",
    "fit": "drop_in",
    "gather": "reduction.whole_batch",
    "plan": "planning.planner",
    "predict": "drop_in",
    "use_logical_cpus": "cluster",
}
# So that `tfpar.data.by_file` needs no separate import.
_PACKAGES = ("callbacks", "checkpoint", "config", "data", "pipeline", "strategies")

__all__ = [
    "Checkpoints",
    "Hybrid",
    "LearningRateWarmup",
    "MetricsFile",
    "Mirrored",
    "MultiWorker",
    "Objective",
    "Pipeline",
    "ReplicaCheck",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "Throughput",
    "Trainer",
    "WorkerLostError",
    "check_parity",
    "doctor",
    "evaluate",
    "fit",
    "gather",
    "plan",
    "predict",
    "use_logical_cpus",
]


def _set_gpu_options() -> None:
    from tfpar._compat import tf_gpu_options  # imports TensorFlow

    tf_gpu_options.install()


versions.warn_if_untested()
tensorflow_log.install()  # before TensorFlow is imported, which writes messages
keras_lazy_imports.install()
keras_lazy_imports.after_import("tensorflow", _set_gpu_options)


if not TYPE_CHECKING:  # a type checker would accept any misspelt name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"tfpar.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'tfpar' has no attribute {name!r}. It has: {', '.join(__all__)}.")
        if _MODULES[name] == "strategies":
            importlib.import_module("tfpar.drop_in")  # gives models in a scope their methods
        return getattr(importlib.import_module(f"tfpar.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

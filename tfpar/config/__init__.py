"""A run as typed data: read from TOML, checked, frozen. Needs no TensorFlow."""

from tfpar.config.data_section import Data, Feature
from tfpar.config.run import NOT_SET, Run, changes, changes_weights, closest_key, dump, load, schema
from tfpar.config.sections import Callbacks, Model, Optimizer, Training
from tfpar.config.strategy_section import (
    Auto,
    Hybrid,
    Mirrored,
    MultiWorker,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
    with_layout,
)

__all__ = [
    "NOT_SET",
    "Auto",
    "Callbacks",
    "Data",
    "Feature",
    "Hybrid",
    "Mirrored",
    "Model",
    "MultiWorker",
    "Optimizer",
    "Pipeline",
    "Run",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "Training",
    "changes",
    "changes_weights",
    "closest_key",
    "dump",
    "load",
    "schema",
    "with_layout",
]

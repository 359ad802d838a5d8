"""The run as typed data: TOML in, frozen and checked models out; needs no TensorFlow."""

from tfpar.config.data_section import Data, Feature
from tfpar.config.run import Run, changes_weights, closest_key, dump, load, schema
from tfpar.config.sections import Callbacks, Model, Optimizer, Strategy, Training

__all__ = [
    "Callbacks",
    "Data",
    "Feature",
    "Model",
    "Optimizer",
    "Run",
    "Strategy",
    "Training",
    "changes_weights",
    "closest_key",
    "dump",
    "load",
    "schema",
]

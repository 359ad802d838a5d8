"""Examples from a function of the user, named by its import path, that returns datasets of single examples."""

import importlib
import inspect
from typing import Any

import tensorflow as tf

from tfpar import config
from tfpar.data.sharding.by_file_or_example import begins_alike
from tfpar.data.sources.held_out import Part, in_part
from tfpar.data.sources.split import Split

CONTRACT = "a function that returns one tf.data.Dataset of (input, label) examples, or two: (train, validation)"


def read(settings: config.Data) -> tuple[Split, Split | None]:
    """Call `data.function` and return its training and validation examples.

    Args:
        settings: Uses `function`, `arguments`, `num_classes`, `validation_split` and `validation_share`.

    Raises:
        ValueError: If there is no such function, it does not take the arguments, or it returns something else.
    """
    name = settings.function or ""
    train, validation = _data_sets(name, _function(name)(**settings.arguments))
    if settings.validation_share is not None:
        if validation is not None:
            raise ValueError(
                f"data.validation_share = {settings.validation_share} holds out training examples, but {name} returns "
                "validation data: leave it out."
            )
        return _split(settings, train, "train"), _split(settings, train, "validation")
    if validation is None or settings.validation_split is None:
        return _split(settings, train, "all"), None
    return _split(settings, train, "all"), _split(settings, validation, "all", "validation dataset")


def _function(name: str) -> Any:
    module_name, _, last = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), last)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f'data.function must be the import path of {CONTRACT}, received "{name}": {error}.') from error
    if not callable(function):
        raise ValueError(f'data.function must be the import path of {CONTRACT}, received "{name}", a {type(function)}.')

    def call(**arguments: Any) -> Any:
        signature = inspect.signature(function)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"data.arguments must be those of {name}{signature}: {error}. Correct [data.arguments]."
            ) from error
        return function(**arguments)

    return call


def _data_sets(name: str, returned: Any) -> tuple[tf.data.Dataset, tf.data.Dataset | None]:
    data_sets = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(data_sets) not in (1, 2) or not all(isinstance(dataset, tf.data.Dataset) for dataset in data_sets):
        kinds = ", ".join(type(part).__name__ for part in data_sets)
        raise ValueError(f"data.function must name {CONTRACT}, but {name} returned {kinds}.")
    for dataset in data_sets:
        _check(name, dataset)
    return data_sets[0], data_sets[1] if len(data_sets) == 2 else None


def _check(name: str, dataset: tf.data.Dataset) -> None:
    spec = dataset.element_spec
    if not (isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(part, tf.TensorSpec) for part in spec)):
        raise ValueError(f"data.function must name {CONTRACT}, each one tensor, but the elements of {name} are {spec}.")
    if all(part.shape.rank and part.shape[0] is None for part in spec):
        raise ValueError(
            f"data.function must return single examples, but the elements of {name} have shapes {spec[0].shape} and "
            f"{spec[1].shape}, as batches have: leave out batch(), as training.global_batch_size sets the batch."
        )
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"data.function must return finite datasets, but {name} returned an infinite one: leave out repeat()."
        )
    if not begins_alike(dataset):
        raise ValueError(
            f"data.function must return examples in a fixed order, but two passes over those of {name} begin "
            "differently: leave out shuffle() and random changes, and set data.shuffle_buffer or data.augmentation."
        )


def _split(settings: config.Data, dataset: tf.data.Dataset, part: Part, what: str = "dataset") -> Split:
    if part != "all":
        numbered = dataset.enumerate()

        def is_own(number: tf.Tensor, example: Any) -> tf.Tensor:
            return in_part(number[tf.newaxis], "", part, settings.validation_share)[0]

        dataset = numbered.filter(is_own).map(lambda number, example: example, num_parallel_calls=tf.data.AUTOTUNE)
        what = "validation share" if part == "validation" else what
    num_examples = int(dataset.cardinality())

    def read_files(num_shards: int, shard: int) -> tf.data.Dataset:
        raise AssertionError("there are no files to shard")

    return Split(
        stored=dataset,
        decode=None,
        num_examples=num_examples if num_examples >= 0 else None,
        num_classes=settings.num_classes,
        origin=f"{what} of {settings.function}",
        read_files=read_files,
        num_files=0,
        encoded=False,
    )

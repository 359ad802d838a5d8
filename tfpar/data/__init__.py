"""Convert settings or arrays to `tf.data.Dataset`s of global batches, with a position that can be replayed."""

import importlib
from typing import TYPE_CHECKING, Any

from tfpar._compat.keras_data_adapters import is_python_source
from tfpar.data.batch_digests import NUM_NUMBERS, batch_digest
from tfpar.data.batching.arrays import from_arrays
from tfpar.data.batching.autotuning import without_autotuning
from tfpar.data.batching.batches import (
    class_weights,
    first_rows,
    has_unknown_size,
    join_batches,
    join_outputs,
    map_batches,
    num_rows,
    present_inputs,
    split_batch,
    take_rows,
    to_numpy,
)
from tfpar.data.batching.equal_rows import check_ranks, differing_rows, with_equal_rows
from tfpar.data.batching.varied_rows import varied_first
from tfpar.data.errors import cause_of, label_out_of_range, user_message
from tfpar.data.fit_arguments import Batches, as_dataset, global_batches, hold_out, is_dataset
from tfpar.data.position import seek
from tfpar.data.python_batches import EMPTY, RAN_OUT, PythonBatches
from tfpar.data.sharding.by_file_or_example import by_example, by_file
from tfpar.data.sharding.sharded import Sharded, first_batches

if TYPE_CHECKING:
    from tfpar.data.loading import Loaded, describe, load
    from tfpar.data.sharding.audit import Audit, audit

__all__ = [
    "EMPTY",
    "NUM_NUMBERS",
    "RAN_OUT",
    "Audit",
    "Batches",
    "Loaded",
    "PythonBatches",
    "Sharded",
    "as_dataset",
    "audit",
    "batch_digest",
    "by_example",
    "by_file",
    "cause_of",
    "check_ranks",
    "class_weights",
    "describe",
    "differing_rows",
    "first_batches",
    "first_rows",
    "from_arrays",
    "global_batches",
    "has_unknown_size",
    "hold_out",
    "is_dataset",
    "is_python_source",
    "join_batches",
    "join_outputs",
    "label_out_of_range",
    "load",
    "map_batches",
    "num_rows",
    "present_inputs",
    "seek",
    "split_batch",
    "take_rows",
    "to_numpy",
    "user_message",
    "varied_first",
    "with_equal_rows",
    "without_autotuning",
]

# Training on a user's own arrays or dataset imports none of the sources.
_HOMES = {
    "Audit": "sharding.audit",
    "Loaded": "loading",
    "audit": "sharding.audit",
    "describe": "loading",
    "load": "loading",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'tfpar.data' has no attribute {name!r}. It has: {', '.join(__all__)}.")
        return getattr(importlib.import_module(f"tfpar.data.{_HOMES[name]}"), name)

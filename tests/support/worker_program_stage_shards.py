"""The program of a worker for test_stage_shards_multi_process.py: stages of shards on the devices of each worker."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import keras

import tfpar
from tests.properties.test_parity import Result, computing_in, train_in_shards
from tests.strategies import test_stages_of_shards as models
from tests.strategies.test_tensor_parallel import FEATURES, divided, of_features, of_tokens, perceptron, state, trained
from tests.support import checkpoint_matrix as matrix
from tests.support import pipeline_cases, shard_cases, small, workers
from tests.support.parity_cases import CASES
from tfpar import config, strategies
from tfpar._compat import keras_divided_state
from tfpar.reduction.weight_owners import num_bytes

FOLDER, RANK = workers.place()
Shard = Literal["optimizer"] | None
SHARDS: tuple[Shard, ...] = (None, "optimizer")


def grid(num_microbatches: int = 2, schedule: str = "1f1b", shard: Shard = None, **settings: Any) -> tfpar.Hybrid:
    """Return one replica of two stages of two shards on each worker."""
    pipeline = tfpar.Pipeline(2, num_microbatches, schedule, "parameters", num_shards=2, **settings)
    return tfpar.Hybrid(pipeline, shard=shard)


def replicas(shard: Shard = None) -> tfpar.Strategy:
    """Return two replicas of two shards on each worker, from the settings of a configuration."""
    return strategies.from_settings(config.TensorParallel(num_shards=2, num_replicas=2, shard=shard))


def in_float64(build: Any, data: Any, strategy: Any) -> tuple[Any, ...]:
    """Train; return logs, outputs and state, and the divided weights."""
    with computing_in("float64"):
        trainer, *found = trained(build, data(), strategy())
        return tuple(found), divided(trainer.model)


def state_of(build: Any, strategy: Any, *callbacks: Any, by_hand: bool = False) -> tuple[Any, ...]:
    """Train in float64; return the history, the chief's state, and the share of the optimizer's bytes held here."""
    with computing_in("float64"):
        trainer = tfpar.Trainer(build, strategy(), seed=0)
        if by_hand:
            trainer.model.optimizer.build(trainer.model.trainable_variables)
        inputs, targets = of_features()
        ways = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": (inputs, targets)}
        history = trainer.fit(inputs, targets, callbacks=[of_one() for of_one in callbacks], **ways).history
        slots = [slot for slot in trainer.model.optimizer.variables if len(slot.shape)]
        held = sum(num_bytes(slot) for slot in slots if not keras_divided_state.is_elsewhere(slot))
        with trainer.strategy.whole_state(trainer.model):
            arrays = state(trainer.model) if RANK == 0 else trainer.model.get_weights()
            return history, arrays, held / sum(map(num_bytes, slots))


def one_weight_a_stage() -> keras.Model:
    """A model of which worker 0 owns all weights."""
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(10, "gelu", use_bias=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax", use_bias=False)(hidden))
    model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9), "sparse_categorical_crossentropy")
    return model


def swap() -> keras.callbacks.Callback:
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


# A model, a strategy by its `shard`, and perhaps callbacks.
OF_WHOLE_STATE: dict[str, tuple[Any, ...]] = {
    "stages, clipped": (models.pairs, grid),
    "replicas, clipped": (models.pairs, replicas),
    "stages, swapped averages": (models.pairs, grid, swap),
    "built by hand": (models.pairs, grid, swap),
    "one weight a stage": (one_weight_a_stage, grid, swap),
    "scaled loss": (
        lambda: perceptron(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01))),
        grid,
    ),
    "overwritten by averages, norm of all": (
        lambda: perceptron(
            lambda: keras.optimizers.Adagrad(0.1, use_ema=True, ema_overwrite_frequency=3, global_clipnorm=0.01)
        ),
        grid,
    ),
}


def bits_of(names: Iterable[str]) -> dict[str, Callable[[], Any]]:
    """Return functions that train in whole and in divided state."""
    found = {}
    for name in names:
        build, strategy, *callbacks = OF_WHOLE_STATE[name]
        for shard in SHARDS:
            chosen = functools.partial(strategy, shard=shard)
            found[f"bits of {name} {shard}"] = functools.partial(
                state_of, build, chosen, *callbacks, by_hand=name == "built by hand"
            )
    return found


def train_row(row: pipeline_cases.Row, shard: Shard) -> Result:
    case = pipeline_cases.deepened(CASES[row.case])
    with computing_in(row.dtype):
        strategy = grid(row.num_microbatches, row.schedule, shard, recompute=row.recompute)
        return train_in_shards(case, tfpar.Trainer(case.build, strategy, seed=0))


def previewed() -> str:
    """Return the table of the stages."""
    return str(tfpar.Trainer(small.build_model, grid(), seed=0).preview(small.data()))


def resumed(before: Shard, after: Shard) -> Any:
    """Begin a run in stages of shards, and end it on replicas of shards."""
    folder = FOLDER / f"checkpoints {before} {after}"
    matrix.begin(grid(shard=before), folder)
    return matrix.end(replicas(after), folder)


def with_rules() -> tfpar.Strategy:
    """Return a replica of two shards on each worker, by the rules of a configuration."""
    rules = {"up/kernel": (None, "model"), "classes/kernel": ("model", None)}
    return strategies.from_settings(config.TensorParallel(num_shards=2, layout=rules))


def with_other_rules() -> tfpar.Strategy:
    """Return replicas with other rules on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(1, 1, num_shards=2, layout={f"layer_{RANK}": (None, "model")}))


def main() -> None:
    names = sys.argv[3:]
    tfpar.use_logical_cpus(4)
    if {*names} <= OF_WHOLE_STATE.keys():
        workers.run_all(bits_of(names))
        return
    rows = {str(row): row for row in pipeline_cases.on_replicas()}
    workers.run_all(
        {
            "description": lambda: [grid().describe(), replicas().describe(), replicas("optimizer").describe()],
            "pairs": functools.partial(in_float64, models.pairs, of_features, replicas),
            "attention": functools.partial(in_float64, models.attention, of_tokens, grid),
            **{
                f"{name} {shard}": functools.partial(train_row, rows[name], shard) for name in names for shard in SHARDS
            },
            **bits_of(shard_cases.STAGES_OF_SHARDS),
            "preview": previewed,
            **{f"resumed {one} {other}": functools.partial(resumed, one, other) for one, other in shard_cases.RESUMED},
            "rules": functools.partial(in_float64, models.pairs, of_features, with_rules),
            "other rules": with_other_rules,
        }
    )


if __name__ == "__main__":
    main()

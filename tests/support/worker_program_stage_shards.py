"""The program of a worker for test_stage_shards_multi_process.py: stages of shards on the devices of each worker."""

from __future__ import annotations

import functools
import sys
from typing import Any

import tfpar
from tests.properties.test_parity import Result, computing_in, train
from tests.strategies import test_stages_of_shards as models
from tests.strategies.test_tensor_parallel import divided, of_features, of_tokens, trained
from tests.support import checkpoint_matrix as matrix
from tests.support import pipeline_cases, small, workers
from tests.support.parity_cases import CASES
from tfpar import config, strategies

FOLDER, RANK = workers.place()


def grid(num_microbatches: int = 2, schedule: str = "1f1b", **settings: Any) -> tfpar.Hybrid:
    """Return one replica of two stages of two shards on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(2, num_microbatches, schedule, "parameters", num_shards=2, **settings))


def replicas() -> tfpar.Strategy:
    """Return two replicas of two shards on each worker, from the settings of a configuration."""
    return strategies.from_settings(config.TensorParallel(num_shards=2, num_replicas=2))


def in_float64(build: Any, data: Any, strategy: Any) -> tuple[Any, ...]:
    """Train; return logs, outputs and state, and the divided weights."""
    with computing_in("float64"):
        trainer, *found = trained(build, data(), strategy())
        return tuple(found), divided(trainer.model)


def train_row(row: pipeline_cases.Row) -> Result:
    case = pipeline_cases.deepened(CASES[row.case])
    with computing_in(row.dtype):
        strategy = grid(row.num_microbatches, row.schedule, recompute=row.recompute)
        trainer = tfpar.Trainer(case.build, strategy, seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def previewed() -> str:
    """Return the table of the stages."""
    return str(tfpar.Trainer(small.build_model, grid(), seed=0).preview(small.data()))


def resumed() -> Any:
    """Begin a run in stages of shards, and end it on replicas of shards."""
    matrix.begin(grid(), FOLDER / "checkpoints")
    return matrix.end(replicas(), FOLDER / "checkpoints")


def with_rules() -> tfpar.Strategy:
    """Return a replica of two shards on each worker, by the rules of a configuration."""
    rules = {"up/kernel": (None, "model"), "classes/kernel": ("model", None)}
    return strategies.from_settings(config.TensorParallel(num_shards=2, layout=rules))


def with_other_rules() -> tfpar.Strategy:
    """Return replicas with other rules on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(1, 1, num_shards=2, layout={f"layer_{RANK}": (None, "model")}))


def with_sharded_state() -> tfpar.Strategy:
    return tfpar.Hybrid(tfpar.Pipeline(1, 2, num_shards=2), shard="optimizer")


def main() -> None:
    names = sys.argv[3:]
    tfpar.use_logical_cpus(4)
    rows = {str(row): row for row in pipeline_cases.on_replicas()}
    workers.run_all(
        {
            "description": lambda: [grid().describe(), replicas().describe()],
            "pairs": functools.partial(in_float64, models.pairs, of_features, replicas),
            "attention": functools.partial(in_float64, models.attention, of_tokens, grid),
            **{name: functools.partial(train_row, rows[name]) for name in names},
            "preview": previewed,
            "resumed": resumed,
            "rules": functools.partial(in_float64, models.pairs, of_features, with_rules),
            "other rules": with_other_rules,
            "sharded state": with_sharded_state,
        }
    )


if __name__ == "__main__":
    main()

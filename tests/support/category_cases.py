"""Files with columns of words, and a training on them that is stopped and resumed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow
import pyarrow.parquet

import tfpar
from tests.support import multi_worker_cases as cases
from tests.support.extent import sampled
from tfpar import config, data
from tfpar.trainers.tabular import build_preprocessing

ROWS, SHARDS = 44, 4
WORDS = ["red", "blue", "grün", "red", "pink"]
CASES = sampled(
    (("csv", "example"), ("csv", "file"), ("parquet", "example"), ("parquet", "file")),
    of_ci=(("csv", "file"),),
)


def columns() -> dict[str, list[Any]]:
    numbers = np.random.default_rng(0).normal(size=ROWS).round(3)
    return {
        "number": numbers.tolist(),
        "color": [WORDS[row % 5] for row in range(ROWS)],
        "size": [f"size {row // 9}" for row in range(ROWS)],  # most words are in one file alone
        "label": [row % 3 for row in range(ROWS)],
    }


def loaded(source: str, shard_by: Any, folder: Path) -> data.Loaded:
    """Load the training rows of four files, written into a folder."""
    for shard in range(SHARDS):
        rows = {name: cells[11 * shard :][:11] for name, cells in columns().items()}
        if source == "parquet":
            pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"train-{shard}.parquet", row_group_size=3)
        else:
            lines = [",".join(map(str, row)) for row in zip(*rows.values(), strict=True)]
            text = "\n".join([",".join(rows), *lines]) + "\n"
            (folder / f"train-{shard}.csv").write_text(text, encoding="utf-8")
    settings = config.Data(
        source="table", directory=str(folder), validation_split=None, category_columns=("color", "size"), num_classes=3,
        shard_by=shard_by, num_shards=2, shuffle_buffer=20, normalization="standard",
    )  # fmt: skip
    return data.load(settings, global_batch_size=8, seed=1)


def train(strategy: tfpar.Strategy, source: str, shard_by: str, checkpoints: Path | None = None) -> Any:
    """Train three epochs; with a folder for checkpoints, stop after step 8 and resume. Return history and weights."""
    with tempfile.TemporaryDirectory() as folder:
        found = loaded(source, shard_by, Path(folder))

        preprocessing = build_preprocessing(found.columns)
        batches = found.train.map(lambda columns, labels: (preprocessing(columns), labels))

        def build() -> keras.Model:
            model = keras.Sequential([keras.Input(preprocessing.output_shape[1:]), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
            return model

        for stops in (True, False) if checkpoints else (False,):
            trainer = tfpar.Trainer(build, strategy, seed=0)
            interrupt = [cases.Interrupt(trainer, at_step=8)] if stops else []
            kept = None if checkpoints is None else tfpar.Checkpoints(checkpoints, 1000.0)
            history = trainer.fit(batches, epochs=3, verbose=0, callbacks=interrupt, checkpoints=kept).history
            assert trainer.interrupted == stops
        return history, cases.state(trainer.model)

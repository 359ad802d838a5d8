"""Columns of words in CSV and Parquet files: the one-hot vectors of StringLookup, for any number of workers."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from conftest import assert_same, epoch, refusal

import tfpar
from tfpar import config
from tfpar.data import Sharded, audit, load, seek
from tfpar.data.sources import categories
from tfpar.trainers.tabular import Tabular

COLORS = ["red", "blue", "grün", "red"]
ROWS = 40
COLUMNS = {
    "number": [float(i) for i in range(ROWS)],
    "color": [COLORS[i % 4] for i in range(ROWS)],
    "label": [i % 3 for i in range(ROWS)],
    "size": [f"size {i % 5}" for i in range(ROWS)],
}


def write(source: str, path: Path, columns: dict[str, list[Any]]) -> None:
    """One file of columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if source == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"), row_group_size=3)
    else:
        lines = [",".join(f" {cell}" for cell in row) for row in zip(*columns.values(), strict=True)]
        path.with_suffix(".csv").write_text("\n".join([",".join(columns), *lines]) + "\n", encoding="utf-8")


def settings(source: str, path: Path, **changes: Any) -> config.Data:
    """Four files of ten rows, and one of rows to validate with words that no training row has."""
    for shard in range(4):
        write(source, path / f"train-{shard}", {k: cells[shard * 10 :][:10] for k, cells in COLUMNS.items()})
    new = {"number": [1.0, 2.0], "color": ["pink", "blue"], "label": [0, 1], "size": ["size 4", "none"]}
    write(source, path / "test-0", new)
    fields = {"directory": str(path), "num_classes": 3, "normalization": "none", "shuffle_buffer": 0}
    return config.Data(**{"source": source, "category_columns": ("color", "size"), **fields, **changes})


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_a_column_of_words_equals_string_lookup(source: str, tmp_path: Path) -> None:
    loaded = load(settings(source, tmp_path), global_batch_size=64, seed=0)
    assert loaded.vocabularies == {"color": ("blue", "grün", "red"), "size": tuple(f"size {i}" for i in range(5))}
    for batches, columns in (
        (loaded.train, COLUMNS),
        (loaded.validation, {"number": [1.0, 2.0], "color": ["pink", "blue"], "size": ["size 4", "none"]}),
    ):
        ((inputs, _),) = epoch(batches)
        expected = [np.array(columns["number"])[:, np.newaxis]]
        for name in ("color", "size"):
            lookup = keras.layers.StringLookup(vocabulary=list(loaded.vocabularies[name]), output_mode="one_hot")
            expected.append(np.asarray(lookup(tf.constant(columns[name]))))
        np.testing.assert_array_equal(inputs, np.concatenate(expected, axis=1))
    assert loaded.input_shape == (1 + 4 + 6,)


@pytest.mark.few(2)
@pytest.mark.parametrize("source", ["csv", "parquet"])
@pytest.mark.parametrize("shard_by", ["file", "example"])
def test_workers_with_shards_of_rows_with_words_read_the_rows_of_one_worker(
    source: str, shard_by: Any, tmp_path: Path
) -> None:
    own = settings(source, tmp_path, shard_by=shard_by, num_shards=2, shuffle_buffer=100)
    loaded = load(own, global_batch_size=8, seed=1)
    assert isinstance(loaded.train, Sharded)
    assert audit(loaded.train, num_workers=2).ok
    whole, parts = epoch(loaded.train.global_batches()), [loaded.train.local_batches(rank, 2) for rank in range(2)]
    for batch, *rows in zip(whole, *parts, strict=False):
        joined = np.concatenate([part[0].numpy()[: int(count)] for part, count in rows])
        np.testing.assert_array_equal(joined, batch[0])
    resumed = load(own, global_batch_size=8, seed=1).train.global_batches()
    assert_same(epoch(seek(resumed, 0, 2)), whole[2:], "after resuming")


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_a_share_of_validation_gives_no_words_and_standard_leaves_one_hot_vectors(source: str, tmp_path: Path) -> None:
    own = settings(source, tmp_path, validation_share=0.3, validation_split="test", normalization="standard")
    loaded = load(own, global_batch_size=64, seed=0)
    ((inputs, _),) = epoch(loaded.train)
    assert abs(inputs[:, 0].mean()) < 1e-6
    assert set(np.unique(inputs[:, 1:])) == {0.0, 1.0}
    ((held_out, _),) = epoch(loaded.validation)
    assert set(np.unique(held_out[:, 1:])) == {0.0, 1.0}
    unique = {"color": [f"color {i}" for i in range(ROWS)]}
    for shard in range(4):
        own_rows = {k: cells[shard * 10 :][:10] for k, cells in {**COLUMNS, **unique}.items()}
        write(source, tmp_path / f"train-{shard}", own_rows)
    loaded = load(own, global_batch_size=64, seed=0)
    ((held_out, _),) = epoch(loaded.validation)
    assert len(loaded.vocabularies["color"]) == ROWS - len(held_out), "the words of the training rows only"
    assert held_out[:, 1].tolist() == [1.0] * len(held_out), "and all others are unknown"


@pytest.mark.parametrize(
    ("source", "place"), [("csv", 'test-0.csv, line 3: the cell " "'), ("parquet", "test-0.parquet, row 2: the cell")]
)
def test_an_empty_cell_is_named_by_file_line_and_column(source: str, place: str, tmp_path: Path) -> None:
    own = settings(source, tmp_path)
    write(
        source, tmp_path / "test-0", {"number": [1.0, 2.0], "color": ["red", ""], "label": [0, 1], "size": ["a", "b"]}
    )
    sentence = refusal(own, "validation")
    assert sentence.startswith(f'{tmp_path}/{place} of column "color" is empty: fill it, with a word'), sentence
    write(source, tmp_path / "train-1", {"number": [1.0], "color": [" "], "label": [0], "size": ["a"]})
    assert "train-1" in refusal(own)


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_a_column_that_is_no_category_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = settings(source, tmp_path)
    misspelt = refusal(own.model_copy(update={"category_columns": ("colour", "size")}))
    assert 'data.category_columns = "colour" is no input column of' in misspelt
    assert 'did you mean "color"?' in misspelt
    monkeypatch.setattr(categories, "MAX_WORDS", 4)
    assert refusal(own) == (
        'A column of data.category_columns must have at most 4 different words, and "size" of the split "train" has '
        "more: leave it out of the inputs."
    )


def test_a_parquet_column_of_words_that_is_not_named_is_refused_with_the_way_out(tmp_path: Path) -> None:
    sentence = refusal(settings("parquet", tmp_path, category_columns=("color",)))
    assert 'The column "size"' in sentence
    assert "leave it out of data.columns, or name it in data.category_columns" in sentence


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['data.category_columns=["a"]'], 'data.category_columns = ["a"] is read only from data.source csv or parquet'),
        (['data.source="csv"', 'data.category_columns=["a", "a"]'], "names one of them twice"),
        (['data.source="csv"', 'data.columns=["b"]', 'data.category_columns=["a"]'], "which is not in data.columns"),
        (['data.source="csv"', 'data.category_columns=["label"]'], "is in data.category_columns too: remove it there"),
    ],
)
def test_settings_of_columns_of_words_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the message is compared below
        config.load(None, ['data.directory="."', *overrides])
    assert message in str(caught.value)


def test_the_tabular_trainer_learns_from_words_alone(tmp_path: Path) -> None:
    """The label follows from the word, not from the number."""
    own = settings("csv", tmp_path, label_key="label", validation_split=None, shuffle_buffer=100)
    for shard in range(4):
        rows = {k: cells[shard * 10 :][:10] for k, cells in COLUMNS.items()}
        rows["label"] = [["blue", "grün", "red"].index(color) for color in rows["color"]]
        write("csv", tmp_path / f"train-{shard}", rows)
    run = config.Run(
        trainer="tfpar.trainers.tabular.Tabular",
        data=own.model_copy(update={"columns": ("color",), "category_columns": ("color",)}),
        model=config.Model(name="linear"),
        optimizer=config.Optimizer(name="sgd", learning_rate=1.0),
        training=config.Training(global_batch_size=10),
    )
    losses = []
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(["CPU:0", "CPU:1"])):
        trainer = Tabular(run, strategy)
        assert trainer.vocabularies == {"color": ("blue", "grün", "red")}
        history = trainer.fit(trainer.train_data, epochs=5, verbose=0).history
        assert history["accuracy"][-1] == 1.0
        losses.append(history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)

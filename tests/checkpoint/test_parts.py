"""Part files of a checkpoint: written, read, removed and found damaged. This process plays the other one too."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import small
from tfpar.checkpoint import Checkpoints, Position, file_format, holders, part_files, remote_copies

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(logical_cpus: list[str]) -> keras.Model:
    """A model with weights of two sizes of floats, random state, moments and a moving average."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(5, dtype="float64"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(4, dtype="bfloat16"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, dtype="float16"),
    ]
    made = keras.Sequential([keras.Input((6,)), *layers])
    made.compile(keras.optimizers.AdamW(0.01, use_ema=True), "mse", metrics=["mae"])
    made.fit(np.ones((8, 6)), np.ones((8, 3)), verbose=0)
    return made


@pytest.fixture
def held(monkeypatch: Patch) -> set[str]:
    """Another process, which is this one again, holds all of the model but its metrics and counters."""
    names: set[str] = set()

    def remote_hosts(variables: dict[str, Any]) -> dict[str, str]:
        found = {name: HOST for name, variable in variables.items() if "dense" in name or "dropout" in name}
        names.update(found)
        return found

    monkeypatch.setattr(holders, "remote_hosts", remote_hosts)
    return names


def save(model: keras.Model, directory: Path, step: int, keep: int = 9, run: str = "") -> Path:
    model.optimizer.iterations.assign(step)
    path = Checkpoints(directory, keep=keep, asynchronous=False, run=run).save(model, Position(epoch=step), {})
    assert path is not None
    return path


def restored_epoch(model: keras.Model, directory: Path) -> int:
    restored = Checkpoints(directory).restore(model)
    assert restored is not None
    return restored[0].epoch


def reset(model: keras.Model) -> None:
    for variable in (*model.variables, *model.optimizer.variables):
        variable.assign(np.zeros(variable.shape, "float32" if variable.dtype == "bfloat16" else variable.dtype))


def parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.part"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- a checkpoint has no layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("written_by_holders", [True, False])
@pytest.mark.parametrize("read_by_holders", [True, False])
def test_what_some_processes_wrote_is_read_by_others(
    model: keras.Model, tmp_path: Path, monkeypatch: Patch, written_by_holders: bool, read_by_holders: bool
) -> None:
    expected = small.state(model)
    for by_holders, work in ((written_by_holders, save), (read_by_holders, lambda *_: None)):
        with monkeypatch.context() as patch:
            if by_holders:
                patch.setattr(
                    holders, "remote_hosts", lambda variables: {name: HOST for name in variables if "dense" in name}
                )
            work(model, tmp_path, int(model.optimizer.iterations))
            if work is not save:
                reset(model)
                assert restored_epoch(model, tmp_path) == int(model.optimizer.iterations)
    assert len(parts(tmp_path)) == written_by_holders
    small.assert_same_state(small.state(model), expected)


def test_the_first_process_copies_and_parses_nothing_that_another_holds(
    model: keras.Model, tmp_path: Path, held: set[str]
) -> None:
    path = save(model, tmp_path, 1)
    assert len(held) > 20
    assert not held & set(file_format.decode(path))
    single = Checkpoints(tmp_path / "single")
    blob = Checkpoints(tmp_path).read()
    assert blob is not None
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / path.name).write_bytes(blob)
    arrays, stored = file_format.decode_partly(tmp_path / "single" / path.name, held.__contains__)
    assert not held & set(arrays)
    assert set(stored) == held
    assert single.position() == Position(epoch=1)


def test_a_worker_without_the_disk_gets_all_parts_in_one_message(
    model: keras.Model, tmp_path: Path, held: set[str]
) -> None:
    expected = small.state(model)
    save(model, tmp_path, int(model.optimizer.iterations))
    blob = Checkpoints(tmp_path).read()
    assert blob is not None
    reset(model)
    Checkpoints(tmp_path / "none").load(model, blob)
    small.assert_same_state(small.state(model), expected)


def test_the_state_at_the_time_of_save_is_written(
    model: keras.Model, tmp_path: Path, held: set[str], monkeypatch: Patch
) -> None:
    expected, write = small.state(model), remote_copies.Copies.write

    def late(copies: remote_copies.Copies, prefix: str) -> list[str]:
        reset(model)
        return write(copies, prefix)

    monkeypatch.setattr(remote_copies.Copies, "write", late)
    save(model, tmp_path, int(model.optimizer.iterations))
    assert not np.array_equal(small.state(model)[0], expected[0])
    restored_epoch(model, tmp_path)
    small.assert_same_state(small.state(model), expected)


@pytest.mark.usefixtures("held")
def test_weights_that_are_not_finite_are_neither_written_nor_read(model: keras.Model, tmp_path: Path) -> None:
    weight, good = model.weights[0], model.weights[0].numpy()
    save(model, tmp_path, 1)
    weight.assign(np.full(weight.shape, np.nan))
    assert Checkpoints(tmp_path, asynchronous=False).save(model, Position(epoch=2), {}) is None
    weight.assign(good)
    assert restored_epoch(model, tmp_path) == 1


@pytest.mark.usefixtures("held")
def test_a_type_that_cannot_hold_the_numbers_is_refused_before_any_weight_is_set(
    model: keras.Model, tmp_path: Path
) -> None:
    weight, good = model.layers[-1].kernel, model.layers[-1].kernel.numpy()
    save(model, tmp_path, 1)
    other = keras.models.clone_model(model, clone_function=widened)
    other.compile(keras.optimizers.AdamW(0.01, use_ema=True), "mse", metrics=["mae"])
    other.fit(np.ones((8, 6)), np.ones((8, 3)), verbose=0)
    other.layers[-1].kernel.assign(np.full(weight.shape, 1e30))
    save(other, tmp_path, 2)
    with pytest.raises(ValueError, match=r"holds numbers in 'weights/.*kernel#3' that float16 cannot hold"):
        Checkpoints(tmp_path).restore(model)
    np.testing.assert_array_equal(weight.numpy(), good)


def widened(layer: keras.Layer) -> keras.Layer:
    return type(layer).from_config({**layer.get_config(), "dtype": "float32"})


def test_copies_of_other_devices_are_in_the_memory_of_the_host(monkeypatch: Patch) -> None:
    """As of a GPU: a copy there would take its memory until the file is written."""
    monkeypatch.setattr(holders, "remote_hosts", lambda variables: dict.fromkeys(variables, HOST))
    with tf.device("CPU:1"):
        away = keras.Variable([1.0, 2.0])
    (copies,), _ = remote_copies.copy(keras.Model(), {"weights/away": away})
    assert away.value.device.endswith("CPU:1")
    assert [tensor.device for tensor in copies.tensors.values()] == [HOST]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("held")
def test_parts_are_removed_with_their_checkpoint_and_when_it_is_replaced(model: keras.Model, tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        save(model, tmp_path, step, keep=2)
    assert names(tmp_path) == sorted(
        [*(path.name for path in parts(tmp_path)), *(f"step-0000000{n}.npz" for n in (2, 3))]
    )
    assert [path.name.partition(".")[0] for path in parts(tmp_path)] == ["step-00000002", "step-00000003"]
    assert restored_epoch(model, tmp_path) == 3


@pytest.mark.usefixtures("held")
def test_what_an_interrupted_write_left_is_removed_by_the_next(model: keras.Model, tmp_path: Path) -> None:
    whole = save(model, tmp_path, 1)
    left = [f"step-00000002.0123abcd.1-of-1{end}" for end in (".part", ".index", ".data-00000-of-00001.tempstate12")]
    others = ["step-00000002.part", "my.part"]
    for name in (*left, *others):
        whole.with_name(name).write_bytes(b"somebody's")
    assert restored_epoch(model, tmp_path) == 1
    save(model, tmp_path, 3)
    assert not set(left) & set(names(tmp_path))
    assert set(others) <= set(names(tmp_path))


@pytest.mark.usefixtures("held")
def test_a_full_disk_of_a_holder_keeps_the_checkpoint_before(
    model: keras.Model, tmp_path: Path, monkeypatch: Patch
) -> None:
    save(model, tmp_path, 1)
    before = names(tmp_path)

    def full(copies: remote_copies.Copies, prefix: str) -> list[str]:
        Path(f"{prefix}.data-00000-of-00001.tempstate1").touch()
        raise tf.errors.ResourceExhaustedError(None, None, "no space")

    monkeypatch.setattr(remote_copies.Copies, "write", full)
    with pytest.raises(OSError, match="No space left on device on worker 0") as raised:
        save(model, tmp_path, 2)
    assert raised.value.errno == errno.ENOSPC
    assert names(tmp_path) == before
    assert restored_epoch(model, tmp_path) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def remove(part: Path, older: Path) -> None:
    part.unlink()


def cut(part: Path, older: Path) -> None:
    os.truncate(part, part.stat().st_size - 8)


def flip(part: Path, older: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 4
    part.write_bytes(content)


def swap(part: Path, older: Path) -> None:
    part.write_bytes(older.read_bytes())


DAMAGES: dict[Callable[[Path, Path], None], str] = {
    remove: "its part step-00000002.*part is missing",
    cut: "its part step-00000002.*part has [0-9,]+ bytes, and was written with [0-9,]+",
    flip: "in step-00000002.*part is changed, or of another checkpoint",
    swap: "in step-00000002.*part is changed, or of another checkpoint",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("read_by_holders", [True, False])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(
    model: keras.Model,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path, Path], None],
    read_by_holders: bool,
) -> None:
    of_holders = {"remote_hosts": lambda variables: {name: HOST for name in variables if "dense" in name}}
    with monkeypatch.context() as patch:
        patch.setattr(holders, "remote_hosts", of_holders["remote_hosts"])
        save(model, tmp_path, 1)
        weights = model.get_weights()
        model.set_weights([weight + weight.dtype.type(1) for weight in weights])
        save(model, tmp_path, 2)
        model.set_weights(weights)
    older, part = parts(tmp_path)
    damage(part, older)
    if read_by_holders:
        monkeypatch.setattr(holders, "remote_hosts", of_holders["remote_hosts"])
    assert restored_epoch(model, tmp_path) == 1
    small.assert_same_state(model.get_weights(), weights)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/step-00000002.npz is damaged (")
    assert re.search(DAMAGES[damage], line), line
    assert line.endswith("; using the checkpoint before it.")
    remove(older, part)
    with pytest.raises(ValueError, match=r"Every checkpoint in .* is damaged, the newest is step-00000002\.npz"):
        Checkpoints(tmp_path).restore(model)


def described(path: Path) -> dict[str, Any]:
    state = json.loads(str(file_format.decode(path)[file_format.STATE]))
    (part,) = state[file_format.PART_FILES]
    return dict(part)


def forgeries(part: dict[str, Any]) -> Iterator[Any]:
    """Descriptions of parts that no run writes."""
    first, *others = part["arrays"]
    for file in ("../" + part["file"], "step-00000001.npz", part["file"].replace("2", "3", 1), "", 5, None, "x" * 9999):
        yield {**part, "file": file}
    for key, values in {
        "type": ("|O", "<f4,<f4", "(9,)<f4", "<U8", 5, None, "<f16", ">f4", "V0"),
        "shape": ([-1], [2**62, 4], ["3"], 3, None, [1.5], [10**30], {}),
        "name": (others[0]["name"],),
        "checksum": ("", None, 5, "0" * 16),
    }.items():
        for value in values:
            yield {**part, "arrays": [{**first, key: value}, *others]}
        yield {**part, "arrays": [{one: first[one] for one in first if one != key}, *others]}
    yield from ({**part, "arrays": one} for one in (None, 5, [], others, [first, *part["arrays"]], [None]))
    yield from (None, 5, "part", [], {})


def test_a_forged_description_is_damage(
    model: keras.Model,
    tmp_path: Path,
    held: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(model, tmp_path, 1)
    path = save(model, tmp_path, 2)
    arrays = file_format.decode(path)
    state = json.loads(str(arrays.pop(file_format.STATE)))
    for forged in [*([one] for one in forgeries(described(path))), 5, "x", {"a": 1}]:
        forged_state = np.array(json.dumps({**state, file_format.PART_FILES: forged}))
        path.write_bytes(file_format.encode([*arrays.items(), (file_format.STATE, forged_state)]))
        assert restored_epoch(model, tmp_path) == 1, forged
        assert len(capsys.readouterr().err) < 400 + len(str(tmp_path)), forged


def test_a_part_is_its_arrays_one_after_another(model: keras.Model, tmp_path: Path, held: set[str]) -> None:
    """Any program can read it: the .npz file is a zip, and names types, shapes and order."""
    path = save(model, tmp_path, 1)
    with zipfile.ZipFile(path) as archive:
        state = json.loads(str(np.load(io.BytesIO(archive.read("state.json.npy")))))
    (part,) = state["part_files"]
    content = path.with_name(part["file"]).read_bytes()
    offset = 0
    for entry in part["arrays"]:
        array = np.frombuffer(content, entry["type"], int(np.prod(entry["shape"])), offset)
        offset += array.nbytes
        if entry["name"].startswith("weights/") and entry["name"].endswith("dense/kernel"):
            np.testing.assert_array_equal(array.reshape(entry["shape"]), model.layers[0].kernel.numpy())
    assert offset == len(content)
    assert part_files.unpack(path, state, lambda name: True)[1].keys() == held

"""Change checkpoints at random: each is restored exactly, passed over, or refused in one sentence.

The newest of two checkpoints is changed. Damage (flipped bits, cut or moved bytes) must never be restored as something
else. A forged file has valid sums: its numbers cannot be distinguished from genuine ones, but a file without the state
of a run must not end in a traceback, take more than a second, or more memory than its size.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import io
import json
import math
import os
import random
import resource
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

LONGEST_SENTENCE = 300
HANG_SECONDS = 120.0  # then the attack ends with the traceback of what hangs, within C code too
MOST_SECONDS = 1.0  # of processor time
MOST_GROWTH_BYTES = 256 << 20
Members = dict[str, bytes]  # the content of each .npy of a checkpoint by its name


def main(arguments: Sequence[str]) -> int:
    """Restore as many changed checkpoints as `--mutations` says, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks checkpoint")
    parser.add_argument("--mutations", type=int, default=1000, help="how many changed checkpoints to restore")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same mutations")
    asked = parser.parse_args(arguments)
    findings, outcomes = attack(asked.mutations, asked.seed)
    print(*findings, sep="\n")
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{asked.mutations} changed checkpoints: {counted}; {len(findings)} findings")
    return 1 if findings else 0


def attack(mutations: int, seed: int) -> tuple[list[str], collections.Counter[str]]:
    """Restore changed checkpoints; return the findings, and how often each outcome was right."""
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        findings = [found for index in range(mutations) if (found := target.strike(seed, index))]
    return findings + target.memory_findings(), target.outcomes


# Damage: bytes of a genuine file


def flip(content: bytes, rng: random.Random) -> bytes:
    """Flip some bits."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Leave out a part: the end, the beginning or the middle."""
    first, last = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return rng.choice((content[:first], content[first:], content[:first] + content[last:]))


def overwrite(content: bytes, rng: random.Random) -> bytes:
    """Write zeros, noise or a copy of another part over a part, as a faulty disk does."""
    first = rng.randrange(len(content))
    length = min(rng.choice((1, 16, 512)), len(content) - first)
    other = rng.randrange(len(content) - length + 1)
    block = rng.choice((bytes(length), rng.randbytes(length), content[other : other + length]))
    return content[:first] + block + content[first + length :]


def insert(content: bytes, rng: random.Random) -> bytes:
    """Insert noise, or the whole file once more."""
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice((rng.randbytes(rng.choice((1, 100))), content)) + content[place:]


# Forgery: other members, with valid sums

ODD: list[Any] = [None, True, -1, -5, 2**63, 10**30, 1.5, math.nan, math.inf, "9", "", "x" * 9999, [], {}, [[]], [5]]
ODD += [{"array": ["<f4", "callbacks/77"]}, {"array": 5}, {"array": ["?", "callbacks/0"], "more": 1}]
ODD += [{"scalar": ["O", "00" * 8]}, {"scalar": ["<f4", "00"]}, {"scalar": ["what", "zz"]}]


def forge_state(members: Members, rng: random.Random) -> Members:
    """Replace, remove or add a value anywhere in the JSON."""
    state = json.loads(str(np.load(io.BytesIO(members["state.json"]))))
    node, key = _some_place(state, rng)
    if rng.random() < 0.2:
        del node[key]
    elif rng.random() < 0.1:
        state["position"]["more"] = rng.choice(ODD)
    else:
        node[key] = rng.choice(ODD)
    return {**members, "state.json": npy(np.array(json.dumps(state)))}


def forge_text(members: Members, rng: random.Random) -> Members:
    """Replace the JSON by what is none, or none of a run."""
    texts = ["", "[]", "5", '"text"', "{}", "null", "[" * 100_000, '{"a":' * 5_000, "9" * 5_000, "{", "\0", "NaN"]
    arrays = [np.array(text) for text in texts] + [np.zeros(3), np.array(["{}", "{}"]), np.array(b"{}"), np.zeros(())]
    return {**members, "state.json": npy(rng.choice(arrays))}


def forge_array(members: Members, rng: random.Random) -> Members:
    """Replace an array by one of another type, shape or content."""
    arrays: list[Any] = [np.array("text"), np.array(np.nan), np.array(1j), np.array(b"x"), np.zeros((0, 5))]
    name = rng.choice(sorted(members))
    shape = np.load(io.BytesIO(members[name])).shape
    arrays += [np.full(shape, fill) for fill in (np.nan, np.inf, -7, 2**62, 1e300, True, "x", b"x", 1j)]
    arrays += [np.zeros(shape, kind) for kind in ("datetime64[s]", "timedelta64[s]", [("a", "f4")], "V8", "f2", "u1")]
    return {**members, name: npy(rng.choice(arrays))}


def forge_header(members: Members, rng: random.Random) -> Members:
    """Claim another shape or type in the header of an array than its bytes have."""
    shapes = ["(1000000000000,)", "(2147483648, 2147483648)", "(-1,)", "(3.5,)", "(True,)", "5", "()", "('a',)"]
    shapes += ["(" * 5000, "-" * 5000 + "1", f"({'9' * 5000},)", "(0, 99999999999999999999)", f"({'1,' * 100})", "{}"]
    kinds = ["'<f8'", "'|O'", "'<U100000000'", "[('a','|O')]", "5", "None", "'V0'", "'>f4'", "''", "'f4,O'", "'<f4'"]
    header = f"{{'descr': {rng.choice(kinds)}, 'fortran_order': False, 'shape': {rng.choice(shapes)}, }}\n".encode()
    start = b"\x93NUMPY" + rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x09"))
    size = len(header).to_bytes(2 if start[6] == 1 else 4, "little")
    return {**members, rng.choice(sorted(members)): start + size + header + rng.randbytes(rng.choice((0, 8, 60)))}


def forge_names(members: Members, rng: random.Random) -> Members:
    """Remove, rename or add members."""
    name = rng.choice(sorted(members))
    others = {key: value for key, value in members.items() if key != name}
    names = ["../../escape", "/tmp/escape", "", "weights/", "callbacks/9", "x" * 60_000, "state.json ", "\udcff"]
    return rng.choice((others, {**others, rng.choice(names): members[name]}, {**members, rng.choice(names): b"junk"}))


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, overwrite, insert]
FORGERIES: list[Callable[[Members, random.Random], Members]]
FORGERIES = [forge_state, forge_state, forge_text, forge_array, forge_header, forge_names]
KINDS = ["fifo", "dangling link", "link to itself", "folder", "empty", "bomb", "twice", "encrypted"]


def npy(array: np.ndarray) -> bytes:
    """The bytes of an array in NumPy's format."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _some_place(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    places = [(tree, key) for key in (tree if isinstance(tree, dict) else range(len(tree)))]
    node, key = rng.choice(places)
    inner = node[key]
    return _some_place(inner, rng) if isinstance(inner, dict | list) and inner and rng.random() < 0.7 else (node, key)


def _zip(members: Members) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{name.encode(errors='replace').decode()}.npy"), content)
    return buffer.getvalue()


class Target:
    """A folder with two checkpoints of a small model; the newer one is struck.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        import keras

        from tfpar.checkpoint import Checkpoints, Position

        keras.utils.set_random_seed(0)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._folder, self._checkpoints = folder / "checkpoints", Checkpoints
        self._model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
        self._model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        self._model.optimizer.build(self._model.trainable_variables)
        callbacks = {"EarlyStopping.0": {"best": 0.5, "wait": 1, "best_weights": [np.arange(6.0), np.ones(2)]}}
        writer = Checkpoints(self._folder, asynchronous=False)
        paths = []
        for step in (1, 2):
            self._model.optimizer.iterations.assign(step)
            paths.append(writer.save(self._model, Position(epoch=step, passes=step), callbacks))
        assert paths[1] is not None
        self._path, self._whole = paths[1], paths[1].read_bytes()
        with zipfile.ZipFile(self._path) as archive:
            self._members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        self._states = {step: self._state_after(step) for step in (1, 2)}
        self._memory_bytes = _most_memory_bytes()

    def strike(self, seed: int, index: int) -> str | None:
        """Change the newer checkpoint, restore, and say what is wrong with the outcome.

        Args:
            seed: Of the attack.
            index: Number of the mutation; seed and index repeat it.
        """
        rng = random.Random(f"{seed}/{index}")
        genuine, name = self._put(rng)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        began, said = time.process_time(), io.StringIO()
        try:
            with redirect_stderr(said), warnings.catch_warnings():
                warnings.simplefilter("error")
                restored = self._checkpoints(self._folder).restore(self._model)
        except ValueError as error:
            found = self._judge_sentence(str(error), genuine)
        except Exception as error:
            found = f"it ended in {type(error).__name__}: {str(error)[:200]}"
        else:
            found = self._judge_state(restored, genuine)
        faulthandler.cancel_dump_traceback_later()
        if found is None and (seconds := time.process_time() - began) > MOST_SECONDS:
            found = f"it took {seconds:.1f} s"
        if found is None and "Traceback" in said.getvalue():
            found = f"it printed a traceback: {said.getvalue()[-300:]}"
        return found and f"mutation {index} of seed {seed} ({name}): {found}"

    def memory_findings(self) -> list[str]:
        """Say whether all strikes together took too much memory."""
        grown = _most_memory_bytes() - self._memory_bytes
        return [f"memory grew by {grown >> 20} MiB"] if grown > MOST_GROWTH_BYTES else []

    def _put(self, rng: random.Random) -> tuple[bool, str]:
        """Put something in the place of the newer checkpoint; say whether damage can only be noticed, and its name."""
        if self._path.is_dir() and not self._path.is_symlink():
            self._path.rmdir()
        self._path.unlink(missing_ok=True)
        chance = rng.random()
        if chance < 0.5:
            damage = rng.choice(DAMAGES)
            self._path.write_bytes(damage(self._whole, rng))
            return True, damage.__name__
        if chance < 0.95:
            forgery = rng.choice(FORGERIES)
            self._path.write_bytes(_zip(forgery(self._members, rng)))
            return False, forgery.__name__
        kind = rng.choice(KINDS)
        self._put_kind(kind)
        return True, kind

    def _put_kind(self, kind: str) -> None:
        if kind == "fifo":
            os.mkfifo(self._path)
        elif kind == "dangling link":
            self._path.symlink_to("nowhere")
        elif kind == "link to itself":
            self._path.symlink_to(self._path.name)
        elif kind == "folder":
            self._path.mkdir()
        elif kind == "bomb":  # 300 MB of zeros in 300 kB
            self._path.write_bytes(_zip(self._members))
            with (
                zipfile.ZipFile(self._path, "a", zipfile.ZIP_DEFLATED) as archive,
                archive.open("a.npy", "w") as member,
            ):
                for _ in range(300):
                    member.write(bytes(1 << 20))
        elif kind == "twice":
            with warnings.catch_warnings(), zipfile.ZipFile(self._path, "w") as archive:
                warnings.simplefilter("ignore")
                for name, content in (*self._members.items(), *list(self._members.items())[:1]):
                    archive.writestr(f"{name}.npy", content)
        else:
            content = bytearray(b"" if kind == "empty" else _zip(self._members))
            for start in [place for place in range(len(content)) if content[place : place + 4] == b"PK\x01\x02"]:
                content[start + 8] |= 1  # the flag of encryption
            self._path.write_bytes(content)

    def _judge_sentence(self, text: str, genuine: bool) -> str | None:
        self.outcomes["refused"] += 1
        if genuine:
            return f"an older checkpoint is whole, and it was refused: {text[:200]}"
        if len(text) > LONGEST_SENTENCE + len(str(self._path)) or "\n" in text.strip():
            return f"the sentence is too long: {text[:400]}"
        return None

    def _judge_state(self, restored: Any, genuine: bool) -> str | None:
        if restored is None:
            return "no checkpoint was found"
        position = restored[0]
        for name, value in vars(position).items():
            if type(value) is not (bool if name == "stopped" else int) or value < 0 or value >= 2**63:
                return f"the position has {name} = {value!r}"
        older = self._equals(self._states[1])
        self.outcomes["passed over" if older else "restored"] += 1
        if not genuine or older or (position.epoch == 2 and self._equals(self._states[2])):
            return None
        return "damage was restored as another state"

    def _state_after(self, step: int) -> list[np.ndarray]:
        self._model.optimizer.iterations.assign(step)
        return self._state()

    def _state(self) -> list[np.ndarray]:
        return [np.array(variable.numpy()) for variable in (*self._model.variables, *self._model.optimizer.variables)]

    def _equals(self, expected: list[np.ndarray]) -> bool:
        return all(np.array_equal(one, other) for one, other in zip(self._state(), expected, strict=True))


def _most_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

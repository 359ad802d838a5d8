"""Hypothesis strategies for malformed inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.toml"))

# Each of them was, or is in some parser, a way to a traceback, to gigabytes or to minutes.
NASTY = [
    *("[" * 5000, "{a=" * 5000, "(" * 5000, '{"a":' * 5000, ".".join("a" * 5000), '"a".' * 3000),
    *("9" * 5000, "0x" + "f" * 5000, "1e" + "9" * 400, "-9223372036854775809", "9223372036854775808", "1_0", "0o17"),
    *("٣", "१२", "²", "1.5", "-0", "inf", "nan", "NaN", "Infinity", "1979-05-27T07:32:00Z", "2020-02-30"),
    *("x" * 300, "x" * 10_000, "/".join(["y" * 300] * 3), "../" * 99, "~nobody/x", "/dev/zero", "/proc/self/mem"),
    *("\0", "\\u0000", "\ud800", "\\ud800", "\u2028", "\x85", "\x9b31m", "\x1b[2J", "\ufeff", "\u202e", "\r", "\n"),
    *('"', "'", '"""', "'''", "\\", "#", "=", ",", ":", "[", "]", "{", "}", "[[a]]", "[a]\n[a]", "none", "true", ""),
    *(
        "[0-999999999]",
        "[0-9]" * 12,
        "(x999999999)",
        "[5-3]",
        "[1,1]",
        "node[1-2]" * 40,
        "%s%n{0}",
        "$(reboot)",
        "`id`",
    ),
    *('\\"' * 4000, '"\\', "''''''", "- " * 2000, " " * 4000, "\t", "a = 1\n" * 2000, "[a.b]\n" * 500),
]


def mutated(samples: Sequence[str]) -> st.SearchStrategy[str]:
    """Valid inputs with one to four places replaced, removed or repeated, and inputs that were never valid.

    Args:
        samples: Valid inputs.
    """

    def mutate(text: str, changes: list[tuple[float, int, str, str]]) -> str:
        for place, length, kind, piece in changes:
            start = int(place * len(text))
            cut = text[start : start + length]
            middle = {"replace": piece, "insert": piece + cut, "remove": "", "repeat": cut * 3}[kind]
            text = text[:start] + middle + text[start + length :]
        return text

    pieces = st.sampled_from(NASTY) | st.text(max_size=20) | st.integers().map(str) | st.floats().map(str)
    change = st.tuples(
        st.floats(0, 1), st.integers(0, 40), st.sampled_from(["replace", "insert", "remove", "repeat"]), pieces
    )
    changed = st.builds(mutate, st.sampled_from(samples), st.lists(change, min_size=1, max_size=4))
    return changed | pieces | st.text(max_size=200)


def toml_files() -> st.SearchStrategy[bytes]:
    """Bytes of a configuration file."""
    samples = [path.read_text(encoding="utf-8") for path in CONFIGS]
    keys = st.sampled_from(
        ["seed", "training.epochs", "data.name", "options.x", "optimizer.settings.x", "strategy.devices"]
    )
    lines = st.lists(st.builds("{} = {}".format, keys, st.sampled_from(NASTY) | st.text(max_size=9)), max_size=5)
    texts = mutated(samples) | lines.map("\n".join)
    return texts.map(encoded) | st.binary(max_size=300)


def encoded(text: str) -> bytes:
    """Return a text as bytes; what UTF-8 cannot have is written all the same."""
    return text.encode("utf-8", "surrogatepass")


def overrides() -> st.SearchStrategy[list[str]]:
    """Values of `--set`."""
    samples = [
        *("training.epochs=3", "optimizer.settings.momentum=0.9", 'data.augmentation=["flip"]', "options.a.b=[1, 2]"),
        *('strategy.devices=["CPU:0", "CPU:1"]', "data.features.image={dtype='jpeg', shape=[8, 8, 3]}", "seed=0"),
    ]
    return st.lists(mutated(samples), min_size=1, max_size=3)


def tf_configs() -> st.SearchStrategy[str]:
    """Values of TF_CONFIG: mutated ones, and any JSON in the places of the right one."""
    right = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "[::1]:2"]}, "task": {"type": "worker", "index": 0}}
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(NASTY[20:]) | st.text(max_size=9)
    names = st.sampled_from(["cluster", "task", "type", "index", "worker", "chief", "ps", "evaluator"]) | st.text(
        max_size=5
    )
    any_json = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=12) | st.dictionaries(names, inner, max_size=4), max_leaves=20
    )
    parts = st.fixed_dictionaries({"cluster": any_json, "task": any_json})
    return mutated([json.dumps(right)]) | parts.map(json.dumps) | any_json.map(json.dumps)


def slurm_variables() -> st.SearchStrategy[dict[str, str]]:
    """The environment of a task of a Slurm job step."""
    number = mutated(["0", "1", "2"])
    return st.fixed_dictionaries(
        {"SLURM_STEP_ID": number, "SLURM_STEP_NODELIST": mutated(["node[01-03,7],gpu1", "rack[1-2]n[3]", "n1"])},
        optional={
            "SLURM_STEP_TASKS_PER_NODE": mutated(["2(x3),1", "1", "2,2"]),
            **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"), number),
            **dict.fromkeys(("SLURM_NODEID", "SLURM_LOCALID"), number),
        },
    )


def command_lines(flags: Sequence[str]) -> st.SearchStrategy[list[str]]:
    """Words of a command line; only flags that begin with one of a command's own names are likely to be known.

    Args:
        flags: Names of flags.
    """
    words = mutated([f"--{name}" for name in flags] + [f"--{name}=1" for name in flags] + ["--", "script.py", "3"])
    return st.lists(words.filter(lambda word: "\0" not in word), max_size=5)

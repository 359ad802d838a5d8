"""A short, fixed sample of malformed inputs for every parser, and all inputs with past bugs."""

import re

import pytest

from tests.attacks import parsers
from tests.support.extent import is_whole
from tfpar import config
from tfpar.cluster import slurm


@pytest.mark.few(6)
@pytest.mark.parametrize("name", parsers.PARSERS)
def test_malformed_inputs_end_in_a_value_or_in_one_sentence_a_problem(name: str) -> None:
    parsers.attack(name, num_inputs=60 if is_whole() else 30, seed=0)


ONCE_ANSWERED_BADLY = [
    ("configuration", b"x = " + b"[" * 5000),
    ("configuration", b"[" + b".".join([b"a"] * 50_000) + b"]"),
    ("configuration", b"seed = " + b"9" * 5000),
    ("configuration", b"seed = 0x" + b"f" * 5000),
    ("configuration", b"x = " + b'"\\"' * 100_000),
    ("configuration", b"[data]\ncachglobal_batch_size = 128"),
    ("configuration", b"\n".join(b"a%d = 1" % number for number in range(20_000))),
    ("configuration", b"[options]\nx = " + b"[" * 40 + b"]" * 40),
    ("overrides", ["training.global_batch_size=9223372036854775808"]),
    ("overrides", ["training.epochs=0x" + "f" * 5000]),
    ("overrides", [".".join(["options"] * 5000) + "=1"]),
    ("overrides", ["options.x=" + "{a=" * 5000]),
    ("overrides", ["model.name=\udcff"]),
    ("overrides", ['strategy.devices=["CPU:' + "9" * 5000 + '"]']),
    (
        "overrides",
        ["callbacks.monitor=val_" + "x" * 10_000, "callbacks.early_stopping_patience=1", "data.validation_split=none"],
    ),
    ("overrides", ["strategy.form_seconds=1e300", "strategy.kind=multi_worker"]),
    ("TF_CONFIG", "[" * 100_000),
    ("TF_CONFIG", '{"task": {"index": ' + "9" * 5000 + "}}"),
    ("TF_CONFIG", '{"cluster": {"worker": [' + ", ".join(map(str, range(20_000))) + "]}}"),
    ("TF_CONFIG", '{"cluster": {"worker": ["[::::]:1"]}, "task": {"type": "worker", "index": 0}}'),
    ("hosts", "node[0-999999999]"),
    ("hosts", "a" + "[0-9]" * 20),
    ("hosts", "x" * 100_000 + "[1-60000]"),
    ("hosts", "node[\u0663]"),
    ("tasks", "1(x999999999)"),
    ("train flags", ["--config", "x" * 300]),
    ("train flags", ["--config", "x" * 10_000 + ".toml"]),
    ("train flags", ["x" * 10_000]),
    ("train flags", ["--" + "x" * 10_000]),
    ("train flags", ["--audit=" + "9" * 5000]),
    ("launch flags", ["--num_workers=\u0663"]),
    ("launch flags", ["--num_workers=1_0"]),
    ("launch flags", ["--flagfile=/dev/zero"]),
    ("launch flags", ["--num_workers=100000"]),
    ("launch flags", ["--cores_per_worker=999999999999"]),
]


@pytest.mark.parametrize(("name", "given"), ONCE_ANSWERED_BADLY, ids=lambda value: f"{value!r:.40}")
def test_an_input_that_was_once_answered_badly_ends_in_a_value_or_a_sentence(name: str, given: object) -> None:
    parsers.check(parsers.PARSERS[name], given)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["training.global_batch_size=9223372036854775808"],
            "must have integers of 64 bits, and it has 922337203685477",
        ),
        (["training.global_batch_size=4294967296"], "training.global_batch_size = 4294967296 must be an integer"),
        (
            ["strategy.form_seconds=inf"],
            "strategy.form_seconds = Infinity must be a finite number above 0 and of at most",
        ),
        (["options.x=" + "[" * 99 + "]" * 99], "must have tables and lists at most 32 levels deep"),
        (["options.x=" + "9" * 5000], "must have integers of 64 bits, and it has one of thousands of digits"),
    ],
)
def test_a_value_beyond_the_limits_is_named(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config.load(None, overrides)


def test_slurms_numbers_are_those_of_ascii_and_name_each_host_once() -> None:
    for hosts in ("node[1,1]", "node[1-3,2]", "a,a", "node[3-1]", "node[\u0661-\u0663]"):
        with pytest.raises(ValueError, match="Start the command with srun"):
            slurm.expand_hosts(hosts)
    assert len(slurm.expand_hosts("node[00001-65536]")) == slurm.MAX_TASKS

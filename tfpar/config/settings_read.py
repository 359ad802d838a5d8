"""Which keys of a run are read, by the train command or by the trainer class.

A trainer class lists the sections and keys that it reads, such as "model.l2", in its attribute `reads`. Setting another
key is an error, and the recorded configuration leaves it out.
"""

import functools
from collections.abc import Collection, Iterator, Sequence

from tfpar import config
from tfpar.config import json_schema, toml
from tfpar.config.sections import Section
from tfpar.messages import received
from tfpar.messages.suggestions import closest

# Read by the train command for any trainer class.
COMMAND_READS = (
    *("trainer", "strategy", "callbacks", "optimizer.warmup_steps"),
    *("training.epochs", "training.steps_per_call", "training.validation_freq"),
    *("training.nonfinite_loss", "training.checkpoint_seconds", "training.keep_checkpoints"),
)
BATCH = "training.global_batch_size"
SCALING = "optimizer.base_batch_size"


def read_keys(reads: Collection[str]) -> frozenset[str]:
    """Return the keys, as `section.key`, that the train command or its trainer class reads.

    Args:
        reads: The sections and keys that the trainer class reads.

    Raises:
        ValueError: If a name is neither a section nor a key.

    >>> "training.clipnorm" in read_keys(["training"]), "training.clipnorm" in read_keys([])
    (True, False)
    """
    read: set[str] = set()
    keys = _keys()
    for name in (*COMMAND_READS, *reads):
        matching = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not matching:
            near = closest(name, [*config.Run.model_fields, *keys])
            raise ValueError(
                f'A trainer\'s `reads` must name sections or keys of a run, received "{name}": '
                + (f'did you mean "{near}"?' if near else "correct or remove it.")
            )
        read.update(matching)
    if BATCH in read:  # the train command scales the learning rate by the global batch
        read.add(SCALING)
    return frozenset(read)


def unread_problems(run: config.Run, reads: Collection[str], trainer: str) -> list[str]:
    """Return a sentence for each key of `run` that is set but not read.

    Args:
        run: The run.
        reads: The sections and keys that its trainer class reads.
        trainer: The import path of the trainer class.

    >>> run = config.load(None, ["model.l2=0.1"])
    >>> unread_problems(run, ["data", "model.l2"], "own.Trainer")
    []
    >>> print(*unread_problems(run, ["data"], "own.Trainer"))
    model.l2 = 0.1 is not read by the trainer own.Trainer: leave it out, or use a trainer whose `reads` names it.
    """
    read = read_keys(reads)
    return [
        f"{key} = {toml.show(value)} is not read by the trainer {received.path(trainer, received.COLUMNS)}: leave it "
        "out, or use a trainer whose `reads` names it."
        for key, value, default in _values(run)
        if key not in read and value != default
    ]


def dump_read(run: config.Run, reads: Collection[str], trainer: str) -> str:
    """Write a run as `tfpar.config.dump` does, without the unread keys; `load` reads the same run back.

    Args:
        run: A run without `unread_problems`.
        reads: The sections and keys that its trainer class reads.
        trainer: The import path of the trainer class.
    """
    read = read_keys(reads)
    tables = run.model_dump()
    for key in _keys():
        if key not in read:
            section, _, inner = key.partition(".")
            tables[section].pop(inner, None) if inner else tables.pop(section)
    unread = [key for key in _keys() if key not in read]
    comment = f"# Left out, as {trainer} does not read them: {', '.join(_short(unread))}.\n\n" if unread else ""
    return comment + toml.write({name: value for name, value in tables.items() if value != {} or name in read})


@functools.cache
def _keys() -> tuple[str, ...]:
    return tuple(json_schema.settings(config.schema()))


def _values(run: config.Run) -> Iterator[tuple[str, object, object]]:
    """Yield every key with its value and default."""
    for name, field in type(run).model_fields.items():
        value = getattr(run, name)
        if isinstance(value, Section):
            for key, inner in type(value).model_fields.items():
                yield f"{name}.{key}", getattr(value, key), inner.default
        else:
            yield name, value, field.default


def _short(keys: Sequence[str]) -> Iterator[str]:
    """Abbreviate keys: the name of a section in place of all its keys."""
    sections = dict.fromkeys(key.partition(".")[0] for key in keys)
    for section in sections:
        own = [key for key in keys if key.partition(".")[0] == section]
        whole = [key for key in _keys() if key.partition(".")[0] == section]
        yield from [section] if own == whole else own

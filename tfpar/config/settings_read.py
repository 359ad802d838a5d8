"""Which keys of a run are read: by the train command, or by its trainer class; needs no TensorFlow.

A trainer class lists the sections or single keys that it reads, such as "model.l2", in its attribute `reads`. An unread
key is refused if it is set, and left out of the recorded configuration.
"""

import functools
from collections.abc import Collection, Iterator, Sequence

from tfpar import config
from tfpar.config import json_schema, toml
from tfpar.config.sections import Section
from tfpar.messages import received
from tfpar.messages.suggestions import closest

# Read by the train command, whatever the trainer class is.
COMMAND_READS = (
    *("trainer", "strategy", "callbacks", "optimizer.warmup_steps"),
    *("training.epochs", "training.steps_per_call", "training.validation_freq"),
    *("training.nonfinite_loss", "training.checkpoint_seconds", "training.keep_checkpoints"),
)
BATCH = "training.global_batch_size"
SCALING = "optimizer.base_batch_size"


def read_keys(reads: Collection[str]) -> frozenset[str]:
    """Return the keys of a run that the train command or its trainer class reads.

    Args:
        reads: Names of sections and keys.

    Returns:
        Keys as `section.key`.

    Raises:
        ValueError: A name that is no section and no key.

    >>> "training.clipnorm" in read_keys(["training"]), "training.clipnorm" in read_keys([])
    (True, False)
    """
    found: set[str] = set()
    keys = _keys()
    for name in (*COMMAND_READS, *reads):
        of_name = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not of_name:
            near = closest(name, [*config.Run.model_fields, *keys])
            raise ValueError(
                f'A trainer\'s `reads` must name sections or keys of a run, received "{name}": '
                + (f'did you mean "{near}"?' if near else "correct or remove it.")
            )
        found.update(of_name)
    if BATCH in found:  # the train command scales by the global batch
        found.add(SCALING)
    return frozenset(found)


def unread_problems(run: config.Run, reads: Collection[str], trainer: str) -> list[str]:
    """Return a sentence for each unread key of `run` that differs from its default.

    Args:
        run: The run.
        reads: The sections and keys that its trainer class reads.
        trainer: The import path of that class.

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
        run: The run, without problems.
        reads: The sections and keys that its trainer class reads.
        trainer: The import path of that class.
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
    """Yield every key with its value and its default."""
    for name, field in type(run).model_fields.items():
        value = getattr(run, name)
        if isinstance(value, Section):
            for key, inner in type(value).model_fields.items():
                yield f"{name}.{key}", getattr(value, key), inner.default
        else:
            yield name, value, field.default


def _short(keys: Sequence[str]) -> Iterator[str]:
    """Yield whole sections by their name, other keys as they are."""
    sections = dict.fromkeys(key.partition(".")[0] for key in keys)
    for section in sections:
        own = [key for key in keys if key.partition(".")[0] == section]
        whole = [key for key in _keys() if key.partition(".")[0] == section]
        yield from [section] if own == whole else own

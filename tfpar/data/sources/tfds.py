"""TensorFlow Datasets by name: tfpar's own `digits` needs no network, all others are downloaded once."""

import contextlib
import difflib
import importlib
import io
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpar import config
from tfpar.data.sources.files import EXAMPLES_IN_A_ROW, FILES_AT_ONCE
from tfpar.data.sources.split import Split
from tfpar.messages import received

OURS = "digits"
NUM_SHARDS = 4


def read(settings: config.Data, split: str) -> Split:
    """Read one split of a TFDS dataset; prepare the dataset first if needed.

    Images stay encoded until `decode`, so that a shuffle buffer takes less memory.

    Args:
        settings: Uses `name`, `directory`, `input_key` and `label_key`.
        split: A TFDS split, such as `train[:80%]`.

    Raises:
        ValueError: If a name, version, split or key is unknown.
        ConnectionError: If the dataset is not prepared and cannot be downloaded.
        OSError: If the folder cannot be written.
    """
    import tensorflow_datasets as tfds  # slow to import, and only TFDS sources need it

    builder = prepared_builder(settings)
    split_info = _split_info(builder, split)
    origin = f'split "{split}" of dataset "{settings.name}"'
    if split_info.num_examples == 0:
        raise ValueError(f"The {origin} holds no examples: choose another split.")
    keys = (settings.input_key, settings.label_key)
    for field, key in zip(("input_key", "label_key"), keys, strict=True):
        if key not in builder.info.features:
            raise ValueError(f'data.{field} is "{key}", but "{settings.name}" has: {", ".join(builder.info.features)}.')
    encoded = {key for key in keys if isinstance(builder.info.features[key], tfds.features.Image)}
    instructions = split_info.file_instructions

    def read_files(num_shards: int, shard: int) -> tf.data.Dataset:
        stored = builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders=tfds.decode.PartialDecoding(
                dict.fromkeys(keys, True), decoders={key: tfds.decode.SkipDecoding() for key in encoded}
            ),
            read_config=tfds.ReadConfig(
                interleave_cycle_length=FILES_AT_ONCE,
                interleave_block_length=EXAMPLES_IN_A_ROW,
                try_autocache=False,
                skip_prefetch=True,
                input_context=tf.distribute.InputContext(num_shards, shard) if num_shards > 1 else None,
            ),
        )
        num_examples = sum(instruction.take for instruction in instructions[shard::num_shards])
        return stored.apply(tf.data.experimental.assert_cardinality(num_examples))

    def decode(example: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        features = builder.info.features
        inputs, label = (features[key].decode_example(example[key]) if key in encoded else example[key] for key in keys)
        return inputs, label

    return Split(
        stored=read_files(num_shards=1, shard=0),
        decode=decode,
        num_examples=split_info.num_examples,
        num_classes=_num_classes(builder, settings),
        origin=origin,
        read_files=read_files,
        num_files=len(instructions),
        encoded=settings.input_key in encoded,
    )


def _num_classes(builder: Any, settings: config.Data) -> int | None:
    known: int | None = getattr(builder.info.features[settings.label_key], "num_classes", None)
    if known and settings.num_classes and known != settings.num_classes:
        raise ValueError(
            f'data.num_classes is {settings.num_classes}, but "{settings.name}" has {known} classes: leave it out.'
        )
    return known or settings.num_classes


def files(settings: config.Data, split: str) -> list[Path]:
    """List the files of a split."""
    instructions = _split_info(prepared_builder(settings), split).file_instructions
    return [Path(instruction.filename) for instruction in instructions]


def prepared_builder(settings: config.Data) -> Any:
    """Return the TFDS builder of `settings.name`, with its data on disk; several processes may call it at once.

    Raises:
        ValueError: If the name or version is unknown.
        ConnectionError: If the dataset is not prepared and cannot be downloaded.
        OSError: If the folder cannot be written.
    """
    builder = _builder(settings)
    if _is_prepared(builder):
        return builder
    try:
        with _one_process_at_a_time(str(builder.data_dir_root), builder.name):
            builder = _builder(settings)  # another process may have prepared it while this one waited
            if not _is_prepared(builder):
                _prepare(builder, settings)
    except ConnectionError:
        raise
    except OSError as error:
        raise OSError(
            f'Dataset "{settings.name}" cannot be written to {builder.data_dir_root} ({error.strerror or error}): '
            "set data.directory to a folder that is writable and has space."
        ) from error
    return _builder(settings)


def _builder(settings: config.Data) -> Any:
    import tensorflow_datasets as tfds

    name = re.split("[:/]", settings.name)[0]
    if name == OURS:
        importlib.import_module("tfpar.data.sources.digits")  # creating the class registers it with TFDS
    _check_name(tfds, name, settings)
    directory = os.path.expanduser(settings.directory) if settings.directory else None
    try:
        with _quiet():
            return tfds.builder(settings.name, data_dir=directory, try_gcs=False)
    except (ValueError, AssertionError, tfds.core.DatasetNotFoundError) as error:
        reason = re.sub(r'^Failed to construct dataset .*?}": ', "", str(error)).split(". ")[0].strip(" .\n")
        raise ValueError(
            f"data.name {received.toml(settings.name)} is no version or configuration of {received.toml(name)}: "
            f"{received.excerpt(reason)}."
        ) from error


def _check_name(tfds: Any, name: str, settings: config.Data) -> None:
    """Look up a name in the installed TFDS and in the folder only, because TFDS would search the network."""
    known = tfds.list_builders(with_community_datasets=False)
    folder = os.path.join(os.path.expanduser(settings.directory or tfds.core.constants.DATA_DIR), name)
    if name in known or os.path.isdir(folder):
        return
    close = difflib.get_close_matches(name, known, n=3) or [OURS, "mnist", "cifar10"]
    raise ValueError(
        f"data.name {received.toml(settings.name)} is no name in TensorFlow Datasets: did you mean "
        f"{' or '.join(close)}?"
    )


def _split_info(builder: Any, split: str) -> Any:
    try:
        return builder.info.splits[split]
    except (KeyError, ValueError, AssertionError) as error:
        available = ", ".join(builder.info.splits)
        raise ValueError(
            f'Dataset "{builder.name}" has no split {received.toml(split)}. It has: {available}; write a part as '
            "train[:80%]."
        ) from error


def _is_prepared(builder: Any) -> bool:
    with _quiet():
        return bool(builder.is_prepared())


def _prepare(builder: Any, settings: config.Data) -> None:
    try:
        if builder.name == OURS:
            with _quiet():
                _download_and_prepare(builder)
        elif _is_offline(builder):
            raise ConnectionError("no host of the dataset has an address")
        else:
            _download_and_prepare(builder)
    except ImportError as error:
        raise ImportError(f'Preparing "{settings.name}" needs the Python package {error.name}: install it.') from error
    except _download_errors() as error:
        raise ConnectionError(
            f'Dataset "{settings.name}" is not prepared in {builder.data_dir_root} and could not be downloaded: run '
            "once with a network, or set data.directory to a folder where it is prepared."
        ) from error


def _download_and_prepare(builder: Any) -> None:
    import tensorflow_datasets as tfds

    num_shards = NUM_SHARDS if builder.name == OURS else None
    # Without a network, the TFDS bucket takes minutes to fail.
    download_config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=num_shards)
    builder.download_and_prepare(download_config=download_config)


def _download_errors() -> tuple[type[Exception], ...]:
    import requests  # comes with TFDS
    import tensorflow_datasets as tfds

    return ConnectionError, requests.exceptions.RequestException, tfds.download.DownloadError


def _is_offline(builder: Any) -> bool:
    """Return whether no host of the dataset has an address; TFDS would retry each for minutes."""
    if urllib.request.getproxies() or _holds_files(Path(builder.data_dir_root) / "downloads"):
        return False
    hosts = {urllib.parse.urlsplit(url).hostname for url in builder.url_infos or ()}
    return bool(hosts) and not any(_has_address(host) for host in hosts if host)


def _holds_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


@contextlib.contextmanager
def _one_process_at_a_time(directory: str, name: str) -> Iterator[None]:
    """Lock a file in the folder; the system releases the lock when the process ends, even after a failure."""
    import fcntl  # not on Windows

    if "://" in directory:  # a bucket has no locks
        yield
        return
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars, prints and log lines of TFDS."""
    from absl import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)

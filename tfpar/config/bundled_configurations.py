"""The configurations that come with tfpar, by name."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from tfpar.messages import received
from tfpar.messages.received import quoted
from tfpar.messages.suggestions import closest, did_you_mean

# A link to configs/ in a clone, a folder in an installed package.
FOLDER = Path(__file__).parent.parent / "configs"


def names() -> list[str]:
    """List the names of the configurations that come with tfpar.

    Example:
        >>> "digits" in names()
        True
    """
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def describe(name: str) -> str:
    """Return the purpose of a configuration that comes with tfpar, the first sentence of its header.

    Example:
        >>> describe("regression_small")
        'configs/regression.toml with 100,000 rows, for a try.'
    """
    lines = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    header = itertools.takewhile(lambda line: not line.startswith("# Command:"), lines)
    sentence, *_ = re.split(r"(?<=\.) ", " ".join(line.removeprefix("#").strip() for line in header))
    return sentence


def find(name_or_path: str) -> Path:
    """Return the file of a configuration.

    Args:
        name_or_path: A name such as "digits", or the path of a TOML file.

    Raises:
        FileNotFoundError: If there is no such file or configuration.

    Example:
        >>> find("digits").name
        'digits.toml'
    """
    path = Path(name_or_path)
    if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
        return path
    if path.suffix == ".toml" or os.sep in name_or_path:
        near = None if os.path.exists(path) or _has_similar(path) else closest(path.stem, names())
        if near is None:
            return path  # the reader checks that it exists
        raise FileNotFoundError(
            f'The configuration file "{received.path(path)}" must exist, found nothing there: write {near} for the '
            "configuration of that name that comes with tfpar."
        )
    if name_or_path not in names():
        raise FileNotFoundError(
            f"There is no configuration {quoted(name_or_path, 40)}.{did_you_mean(name_or_path, names())} A "
            f"configuration is a TOML file or one of {received.listed(names(), 180)}."
        )
    return FOLDER / f"{name_or_path}.toml"


def _has_similar(path: Path) -> bool:
    """Return whether a file beside `path` has a similar name, which the reader suggests."""
    beside = [other.name for other in path.parent.glob("*.toml")]
    return path.stem not in names() and closest(path.name, beside) is not None

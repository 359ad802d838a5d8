"""Flags that are files or folders."""

from __future__ import annotations

import os
from typing import Any

from absl import flags


class FilePath(flags.ArgumentParser[str]):
    """Takes a path, with `~` for the home folder: shells replace it in `--flag ~/x`, and not in `--flag=~/x`.

    Example:
        >>> FilePath().parse("runs/digits")
        'runs/digits'
    """

    def parse(self, argument: Any) -> str:
        """Return the path that a text means."""
        return os.path.expanduser(str(argument))

"""Parser for flags that are paths."""

from __future__ import annotations

import os
from typing import Any

from absl import flags


class FilePath(flags.ArgumentParser[str]):
    """Parse a path and expand `~`, which shells expand in `--flag ~/x`, but not in `--flag=~/x`.

    Example:
        >>> FilePath().parse("runs/digits")
        'runs/digits'
    """

    def parse(self, argument: Any) -> str:
        """Convert a flag value."""
        return os.path.expanduser(str(argument))

"""The program of a worker for test_checkpoint_matrix_multi_process.py: runs begun and ended under one layout."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import tfpar
from tests.support import checkpoint_matrix as matrix
from tests.support import workers


def end(strategy: tfpar.Strategy, first: str, second: str, root: Path) -> matrix.Ended:
    if strategy.is_chief:
        matrix.copied(first, second, root)
    strategy.barrier()
    return matrix.end(strategy, root / "ended" / f"{first}_{second}".replace(" ", "_"))


def begin(strategy: tfpar.Strategy, layout: str, root: Path) -> None:
    matrix.begin(strategy, matrix.begun(layout, root))
    if strategy.is_chief:
        (root / f"{layout}.ready").touch()


def main() -> None:
    layout, root, *firsts = sys.argv[3], Path(sys.argv[4]), *sys.argv[5:]
    tfpar.use_logical_cpus(2)
    strategy = matrix.OVER_WORKERS[layout]()
    firsts = [*(one for one in firsts if one != layout), layout]  # its own run begins the last here
    workers.run_all(
        {
            "begin": functools.partial(begin, strategy, layout, root),
            **{f"from {first}": functools.partial(end, strategy, first, layout, root) for first in firsts},
        }
    )


if __name__ == "__main__":
    main()

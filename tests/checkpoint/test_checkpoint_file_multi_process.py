"""A writer that is killed at any moment leaves whole files only."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tfpar.checkpoint import file_format

pytestmark = pytest.mark.multi_process

WRITER = """
    import sys
    from pathlib import Path
    import numpy as np
    from tfpar.checkpoint import file_format
    first = int(sys.argv[2])
    for step in range(first, first + 1000):
        arrays = {f"weights/{layer}": np.full(250_000, step, "float32") for layer in range(5)}
        file_format.write(Path(sys.argv[1], f"step-{step:08d}.npz"), arrays.items(), keep=3)
"""


def kill_amid_a_write(directory: Path, first: int, after_seconds: float) -> None:
    """Start a writer, and kill it some time after it has written its first file."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(directory), str(first)])
    try:
        deadline = time.monotonic() + 30
        while not (directory / f"step-{first:08d}.npz").exists():
            assert process.poll() is None, "the writer failed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(after_seconds)
    finally:
        process.kill()
        process.wait()


def test_after_kill_9_amid_a_write_every_file_is_whole(tmp_path: Path) -> None:
    halves = 0
    for trial in range(12):
        first = 1000 * (trial + 1)
        kill_amid_a_write(tmp_path, first, after_seconds=0.003 * trial)
        halves += len(list(tmp_path.glob("*.unfinished")))
        paths = file_format.paths(tmp_path)
        assert len(paths) <= 4, "as many as are kept, and one that came before the oldest was removed"
        for path in paths:
            for array in file_format.decode(path).values():
                assert (array == int(path.stem.removeprefix("step-"))).all()
    assert halves > 0, "no kill came amid a write"
    file_format.write(tmp_path / "step-99999999.npz", {"a": np.zeros(1)}.items(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-99999999.npz"], "the next writer cleans up"

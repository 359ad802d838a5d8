"""tfpar of another commit, in a folder that holds nothing else: models, data and clock stay those of today."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks import peers, process


def resolved(commit: str) -> str:
    """Return the hash of a commit.

    Args:
        commit: Anything that git resolves, such as `main` or `HEAD~3`.

    Raises:
        ValueError: If there is no such commit.
    """
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(command, cwd=process.ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise ValueError(f"git knows no commit {commit!r} in {process.ROOT}. `git log --oneline` lists commits.")
    return found.stdout.strip()


def folder(commit: str) -> Path:
    """Return a folder with tfpar of a commit, made at its first use; all of it or nothing.

    Args:
        commit: A hash.
    """
    target = peers.root() / f"tfpar-{commit}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["git", "archive", commit, "tfpar"]
    archive = subprocess.run(command, cwd=process.ROOT, capture_output=True, check=True).stdout
    unfinished = Path(tempfile.mkdtemp(dir=target.parent))
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(unfinished, filter="data")
    return unfinished.rename(target)

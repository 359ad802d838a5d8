"""The report of a run as files of its folder: `report.html`, and its pictures in `report/`. No TensorFlow."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from tfpar.files import atomic_file
from tfpar.reports import page, recorded_run

PAGE, PICTURES = "report.html", "report"
_NAMES = ("metrics", "speed", "timeline", "plan", "memory")


def write(folder: Path, *, status: str | None = None, output: Path | None = None) -> Path:
    """Write the report of a run into its folder; pictures of an earlier one are replaced or removed.

    Args:
        folder: The run directory.
        status: The status of the run; by default as its folder says.
        output: Another file for the page; the pictures are then in the page alone.

    Returns:
        The page.

    Raises:
        ValueError: If the folder is no run, or holds a link in place of the folder of pictures.
        OSError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.toml").write_text("")
        >>> write(folder).name
        'report.html'
    """
    text, images = page.report(recorded_run.read(folder, status=status))
    if output is not None:
        atomic_file.write(output, text)
        return output
    _write_pictures(folder / PICTURES, images)
    atomic_file.write(folder / PAGE, text)
    return folder / PAGE


def _write_pictures(folder: Path, images: dict[str, bytes]) -> None:
    if folder.is_symlink() or (folder.exists() and not stat.S_ISDIR(folder.lstat().st_mode)):
        raise ValueError(f"{folder} must be a folder, and is not. Remove it.")
    folder.mkdir(exist_ok=True)
    for name, png in images.items():
        atomic_file.write(folder / f"{name}.png", png)
    for name in set(_NAMES) - set(images):
        with contextlib.suppress(OSError):
            (folder / f"{name}.png").unlink()

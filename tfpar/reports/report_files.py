"""The report of a run as a file in its folder."""

from __future__ import annotations

from pathlib import Path

from tfpar.files import atomic_file
from tfpar.reports import page, recorded_run

PAGE = "report.html"


def write(folder: Path, *, status: str | None = None, output: Path | None = None) -> Path:
    """Write the report of a run, and return its path.

    Args:
        folder: The run directory.
        status: The status of the run. By default, it is derived from the files.
        output: The file to write. Defaults to `report.html` in the run directory.

    Raises:
        ValueError: If the folder holds no run.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.toml").write_text("")
        >>> write(folder).name
        'report.html'
    """
    output = output or folder / PAGE
    atomic_file.write(output, page.report(recorded_run.read(folder, status=status), output.parent))
    return output

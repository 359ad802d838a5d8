"""`python -m tfpar.report`: write the report of a run again, or compare several runs, without TensorFlow.

python -m tfpar.report runs/digits                              writes runs/digits/report.html
python -m tfpar.report runs/digits runs/digits_pipeline         writes comparison.html
python -m tfpar.report runs/* --output /tmp/all.html
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from tfpar.commands import command_line
from tfpar.commands.path_flags import FilePath
from tfpar.files import atomic_file
from tfpar.messages import received
from tfpar.messages.number_format import line
from tfpar.reports import comparison, page, recorded_run, report_files
from tfpar.reports.recorded_run import RecordedRun

MOST_RUNS = 50
COMPARISON = "comparison.html"
_VALUES: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]  # other commands have flags of the same names
_OUTPUT = flags.DEFINE(
    FilePath(),
    "output",
    None,
    f"File of the page; by default report.html in the folder of the run, and {COMPARISON} here for several.",
    flag_values=_VALUES,
)
COMMAND = command_line.Command(
    name="tfpar.report",
    usage=["RUN [RUN ...] [--output FILE]"],
    flags={"output": "FILE"},
    examples=[
        "python -m tfpar.report runs/digits",
        "python -m tfpar.report runs/digits runs/digits_pipeline",
    ],
    details=lambda: "RUN is the folder of a run that python -m tfpar.train has written.",
    values=_VALUES,
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: The command line without the flags that absl has parsed.

    Returns:
        The exit code: 0, or 1 after an error.
    """
    try:
        folders = [Path(name) for name in argv[1:]]
        _require_folders(argv[1:])
        output = _output()
        runs = [recorded_run.read(folder) for folder in folders]
        written = report_files.write(folders[0], output=output) if len(runs) == 1 else _compare(runs, output)
        print(_text(runs, written))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        name = received.path(os.fsdecode(error.filename or "The report"))
        print(f"error: {name}: {error.strerror}. Choose another --output.", file=sys.stderr)
        return 1
    return 0


def _require_folders(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("Name the folder of a run, or of several. See python -m tfpar.report --help.")
    if len(names) > MOST_RUNS:
        raise ValueError(f"At most {MOST_RUNS} runs can be compared, received {len(names)}. Name fewer.")
    named: dict[str, str] = {}
    for name in names:
        path = os.path.realpath(name)
        if path in named:
            raise ValueError(
                f"Runs to compare must be different folders, and {received.path(name)} is "
                f"{received.path(named[path])} again. Name it once."
            )
        named[path] = name


def _output() -> Path | None:
    if _OUTPUT.value is None:
        return None
    output = Path(_OUTPUT.value)
    if not _OUTPUT.value.strip() or output.is_dir():
        raise ValueError(
            f"--output must be a file, received {received.quoted(_OUTPUT.value)}. Name one, such as {COMPARISON}."
        )
    return output


def _compare(runs: Sequence[RecordedRun], output: Path | None) -> Path:
    output = output or Path(COMPARISON)
    atomic_file.write(output, comparison.comparison(runs))
    return output


def _text(runs: Sequence[RecordedRun], written: Path) -> str:
    """Return a summary of the runs, and where the report is."""
    if len(runs) > 1:
        return f"{comparison.text(runs)}\n\n{line('report', str(written))}"
    (run,) = runs
    rows = {"run": str(run.folder), **page.headline(run)}
    columns = 2 + max(map(len, [*rows, "report"]))
    lines = [line(page.shown(name), page.shown(value), columns) for name, value in rows.items()]
    lines += [line("note", page.shown(note), columns) for note in run.notes]
    lines.append(line("report", str(written), columns))
    return "\n".join(lines)


def run() -> None:
    """Entry point of the console script `tfpar-report`."""
    command_line.run(main, functools.partial(command_line.parse, COMMAND))


if __name__ == "__main__":
    run()

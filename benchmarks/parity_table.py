"""The table of docs/exactness.md: which cases equal one device on two logical CPUs, with Keras' `fit` and with tfpar.

Every cell is a process of its own (`benchmarks.parity_cases`), because many of Keras' end in a crash. No TensorFlow
here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import process

NAME = "parity_table"
SUMMARY = "Weights after 20 steps on 2 replicas against 1 device, in float64: Keras' fit and tfpar, as Markdown"
TRAINERS = {"keras": "Keras `fit`, `MirroredStrategy`", "tfpar": "`tfpar.Mirrored`"}
CASES = (
    "full batches",
    "sample weights",
    "L2 regularization",
    "global batch of 7 over 2 replicas",
    "last batch of 1",
    "masked sequence loss",
    "`clipnorm`",
    "`global_clipnorm`",
    "`gradient_accumulation_steps=2`",
    "EMA, `ema_overwrite_frequency=3`",
    "`steps_per_execution=2`",
    "second model in one process",
)
# What parity means: tfpar.parity.TOLERANCES["float64"], which cannot be imported without TensorFlow.
TOLERANCE = 1e-9
TIMEOUT_SECONDS = 180.0
NUM_WORDS_OF_ERROR = 8

# What TensorFlow and Keras write around the sentence that says what is wrong.
_FRAME = re.compile(r"Graph execution error|Detected at node|File \"|\d+ root error|Exception encountered|in user code")
_PREFIX = re.compile(r"\x1b\[\d*m|\{\{.*?\}\}|\(\d+\) [A-Z_]+:|^\w+Error:")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What became of one case under one trainer.

    Args:
        difference: Largest relative difference of a weight; None after a crash.
        error: The first words of the error; empty without one.
    """

    difference: float | None = None
    error: str = ""

    @property
    def text(self) -> str:
        """The cell as a reader sees it."""
        if self.difference is None:
            return f"crashes: {self.error}"
        return "equal" if self.difference <= TOLERANCE else f"differs by {self.difference:.1e}"


Table = Mapping[str, Mapping[str, Cell]]


def first_words(message: str) -> str:
    """Return the first words of what an error says, without the traceback and the marks around it.

    Args:
        message: The text of an exception.

    Example:
        >>> first_words("Graph execution error:\\n\\n  (0) INVALID_ARGUMENT:  You must feed a value")
        'You must feed a value'
    """
    lines = [line.strip() for line in message.splitlines()]
    telling = [line for line in lines if line and not _FRAME.match(line)]
    return " ".join(_PREFIX.sub("", (telling or ["no message"])[0]).split()[:NUM_WORDS_OF_ERROR])


def run_table(
    cases: Sequence[str] = CASES,
    ask: Callable[..., dict[str, Any]] = process.ask,
    report: Callable[[str], None] = lambda line: None,
) -> Table:
    """Run every case under both trainers, each in a fresh process.

    Args:
        cases: Names of cases.
        ask: Runs a process; tests give another.
        report: Is told each cell as it comes.

    Returns:
        Cells by case and trainer.
    """
    table: dict[str, dict[str, Cell]] = {case: {} for case in cases}
    for case in cases:
        for trainer in TRAINERS:
            table[case][trainer] = _run_cell(case, trainer, ask)
            report(f"{NAME}: {case}, {trainer}: {table[case][trainer].text}")
    return table


def _run_cell(case: str, trainer: str, ask: Callable[..., dict[str, Any]]) -> Cell:
    try:
        return Cell(**ask("benchmarks.parity_cases", {"case": case, "trainer": trainer}, TIMEOUT_SECONDS))
    except process.WorkerError as error:  # the process died or hangs, which no `except` inside it could catch
        return Cell(error=first_words(str(error)))


def as_markdown(table: Table) -> str:
    """Return the table as Markdown."""
    rows = [["Case", *TRAINERS.values()], ["---"] * (1 + len(TRAINERS))]
    rows += [[case, *(cells[trainer].text for trainer in TRAINERS)] for case, cells in table.items()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def as_json(table: Table) -> dict[str, Any]:
    """Return the table as JSON holds it."""
    return {
        "name": NAME,
        "summary": SUMMARY,
        "tolerance": TOLERANCE,
        "cases": {
            case: {trainer: {**dataclasses.asdict(cell), "text": cell.text} for trainer, cell in cells.items()}
            for case, cells in table.items()
        },
    }

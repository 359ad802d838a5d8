"""The table of docs/exactness.md: which cases equal one device on two logical CPUs, with Keras' `fit` and with tfpar.

Every cell is a separate process (`benchmarks.parity_cases`), because many of Keras' end in a crash. No TensorFlow
here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Result

NAME = "parity_table"
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
# What parity means: tfpar.comparable.TOLERANCES["float64"], which cannot be imported without TensorFlow.
TOLERANCE = 1e-9
TIMEOUT_SECONDS = 180.0
NUM_WORDS_OF_ERROR = 8

# What TensorFlow and Keras write around the sentence that says what is wrong.
_FRAME = re.compile(r"Graph execution error|Detected at node|File \"|\d+ root error|Exception encountered|in user code")
_PREFIX = re.compile(r"\x1b\[\d*m|\{\{.*?\}\}|\(\d+\) [A-Z_]+:|^\w+Error:")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One case under one trainer.

    Args:
        case: A name in `CASES`.
        trainer: A name in `TRAINERS`.
    """

    case: str
    trainer: str


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


def measure(cell: Cell) -> Output:
    """Return the largest relative difference of a weight; after a crash the first words of the error.

    Args:
        cell: What to compare with one device.
    """
    try:
        return process.ask("benchmarks.parity_cases", dataclasses.asdict(cell), TIMEOUT_SECONDS)
    except process.WorkerError as error:  # the process died or hangs, which no `except` inside it could catch
        return {"error": first_words(str(error))}


def experiment(cases: Sequence[str] = CASES) -> Experiment:
    """Return the experiment of some cases, each under both trainers.

    Args:
        cases: Names in `CASES`.
    """
    return Experiment(
        name=NAME,
        summary="Weights after 20 steps on 2 replicas against 1 device, in float64: Keras' fit and tfpar, as Markdown",
        figure="difference",
        settings={_name(case, trainer): Cell(case, trainer) for case in cases for trainer in TRAINERS},
        measure=measure,
        findings=(_equal_cases("keras", cases), _equal_cases("tfpar", cases, at_least=len(cases))),
        has_rounds=False,
    )


def _name(case: str, trainer: str) -> str:
    return f"{case}, {trainer}"


def _equal_cases(trainer: str, cases: Sequence[str], at_least: float | None = None) -> Finding:
    return Finding(
        f"{trainer}: cases that equal one device, of {len(cases)}",
        lambda outputs: sum(text_of(outputs[_name(case, trainer)]) == "equal" for case in cases),
        at_least,
    )


def text_of(output: Output) -> str:
    """Return a cell as a reader sees it.

    Args:
        output: Of `measure`.
    """
    if "difference" not in output:
        return f"crashes: {output['error']}"
    return "equal" if output["difference"] <= TOLERANCE else f"differs by {output['difference']:.1e}"


def as_markdown(result: Result) -> str:
    """Return the table as Markdown.

    Args:
        result: Of `experiment`.
    """
    (outputs,) = result.rounds
    cases = dict.fromkeys(cell.case for cell in result.experiment.settings.values())
    rows = [["Case", *TRAINERS.values()], ["---"] * (1 + len(TRAINERS))]
    rows += [[case, *(text_of(outputs[_name(case, trainer)]) for trainer in TRAINERS)] for case in cases]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


PARITY_TABLE = experiment()

"""Format a plan as text of 80 columns, as JSON and as HTML. Pure Python."""

from __future__ import annotations

import html as markup
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.messages.number_format import duration, figure, memory, three_digits
from tfpar.messages.received import excerpt

if TYPE_CHECKING:
    from tfpar.planning.plan import Plan, Row

COLUMNS = 80
_LABEL, _NUMBER, _LAYOUT = 11, 4, 32
_LONGEST_NAME, _MOST_NAMED, _LONGEST_REASON = 60, 6, 240
_HEADINGS = ("step", "spread", "examples/s", "x one", "memory")
_WIDTHS = (9, 8, 11, 6, 10)
_STYLE = "text-align:left"
_MORE = " \\"  # the command continues


def text(plan: Plan) -> str:
    """Return a plan as text of 80 columns."""
    lines = [line for label, words in _head(plan).items() for line in _labelled(label, words)]
    if plan.rows:
        lines += ["", _line("#", "layout", _HEADINGS)]
        lines += [_line(_number(row, plan), str(row.layout), _cells(row, plan)) for row in plan.rows]
    lines.append("")
    if plan.command and plan.best is not None:
        # Continued over lines as a shell reads it, so that it can be copied.
        lines += command_lines("Take 1:", plan.command)
    for sentence in _sentences(plan):
        lines += textwrap.wrap(sentence, COLUMNS, break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in lines)


def _head(plan: Plan) -> dict[str, str]:
    facts, devices = plan.facts, plan.devices
    workers = f" on each of {devices.num_workers} workers" if devices.num_workers > 1 else ""
    limit = "" if devices.memory_bytes is None else f", each with {memory(devices.memory_bytes)}"
    differs = any(row.layout.num_devices > 1 for row in plan.rows) and facts.normalizing
    result = "normalization makes the rows differ, see below" if differs else "each row gives the same result"
    return {
        "model": f"{excerpt(facts.name, _LONGEST_NAME)}, {facts.num_parameters:,} parameters "
        f"({memory(facts.weight_bytes)}; optimizer {memory(facts.slot_bytes)})",
        "batch": f"{facts.batch:,} example{'s' * (facts.batch != 1)}; {result}",
        "devices": f"{devices.number} {devices.kind}{'s' * (devices.number != 1)}{workers}{limit}",
        "measured": f"{len(plan.rows)} of {len(plan.rows) + len(plan.others)} layouts in {duration(plan.seconds)}, "
        f"of a budget of {duration(plan.budget_seconds)}",
    }


def _line(number: str, name: str, cells: Sequence[str]) -> str:
    """Return a row of the table; a long name has a line of its own."""
    figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    if len(name) <= _LAYOUT:
        return f"{number:<{_NUMBER}}{name:<{_LAYOUT}}{figures}"
    return f"{number:<{_NUMBER}}{name}\n{' ' * (_NUMBER + _LAYOUT)}{figures}"


def _number(row: Row, plan: Plan) -> str:
    """Return the rank of a row, with an equals sign if other rows share it."""
    return f"{row.rank}{'=' * (sum(other.rank == row.rank for other in plan.rows) > 1)}"


def _cells(row: Row, plan: Plan) -> tuple[str, ...]:
    speed, times = plan.facts.batch / row.step_seconds, _times_one(row, plan)
    return (
        duration(row.step_seconds),
        f"{100 * row.measured.spread_seconds / row.step_seconds:.1f} %",
        figure(round(speed)) if speed >= 10 else figure(speed),
        "" if times is None else three_digits(times) if f"{times:.2f}" != "1.00" else "1",
        "?" if row.measured.memory_bytes is None else memory(row.measured.memory_bytes),
    )


def _times_one(row: Row, plan: Plan) -> float | None:
    """Return the speed relative to one device; None if one device was not measured."""
    single = next((other for other in plan.rows if other.layout.num_devices == 1), None)
    return None if single is None else single.step_seconds / row.step_seconds


def _sentences(plan: Plan) -> Iterator[str]:
    if len({row.rank for row in plan.rows}) < len(plan.rows):
        yield "Rows of the same rank are equal within their spreads; the simplest is first."
    if plan.best is None:
        yield "No layout could be measured. Use a smaller training.global_batch_size, or more devices."
    elif plan.facts.wait_seconds > plan.best.step_seconds:
        yield (
            f"Reading a batch takes {duration(plan.facts.wait_seconds)}, longer than the fastest step: the input "
            "pipeline limits the speed of training."
        )
    if plan.facts.normalizing and any(row.layout.num_devices > 1 for row in plan.rows):
        yield (
            f"{', '.join(plan.facts.normalizing)}: normalizes each part of a batch by itself, so that several devices "
            "give another result than one."
        )
    if plan.devices.kind == "CPU" and plan.devices.number > 1:
        yield (
            "Logical CPUs share the cores and memory of one machine: they show that results agree, not the speed of "
            "several machines."
        )
    yield from (f"Not measured: {words}." for words in _others(plan))
    if plan.not_considered:
        yield f"Not considered: {'; '.join(plan.not_considered)}."


def _others(plan: Plan) -> Iterator[str]:
    """Yield the layouts that were not measured, grouped by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for layout, reason in plan.others:
        names_by_reason.setdefault(reason, []).append(str(layout))
    for reason, names in names_by_reason.items():
        more = [f"{len(names) - _MOST_NAMED} more"] * (len(names) > _MOST_NAMED)
        yield f"{', '.join([*names[:_MOST_NAMED], *more])} ({excerpt(reason, _LONGEST_REASON).rstrip('.')})"


def command_lines(label: str, command: str) -> Iterator[str]:
    """Yield a command over several lines that a shell can read, broken before flags and within long words.

    Args:
        label: The first word of the first line.
        command: The command.

    Example:
        >>> list(command_lines("Take 1:", "python -m tfpar.train --config run.toml"))
        ['Take 1:    python -m tfpar.train --config run.toml']
    """
    begin = f"{label:<{_LABEL}}"
    lines = [begin]
    for words in _flags(command):
        separator = "" if lines[-1] == begin else " "
        if len(lines[-1]) + len(separator) + len(words) + len(_MORE) <= COLUMNS:
            lines[-1] += separator + words
        else:
            lines.append(f"{' ' * _LABEL}  {words}")
    for number, line in enumerate(lines, 1):
        yield from _broken(line + _MORE * (number < len(lines)))


def _flags(command: str) -> Iterator[str]:
    """Yield the program, then each flag with its value, quoted for a shell."""
    words: list[str] = []
    for word in shlex.split(command):
        if word.startswith("--") and words:
            yield shlex.join(words)
            words = []
        words.append(word)
    yield shlex.join(words)


def _broken(line: str) -> Iterator[str]:
    """Break a line that is too long; a shell joins the lines, because each begins in the first column."""
    while len(line) > COLUMNS and "'\"'\"'" not in line:  # a quotation mark that is quoted
        is_quoted = line[: COLUMNS - 2].count("'") % 2 == 1
        cut = COLUMNS - 2 if is_quoted else COLUMNS - 1
        yield line[:cut] + "'" * is_quoted + "\\"
        line = "'" * is_quoted + line[cut:]
    yield line


def _labelled(label: str, words: str) -> list[str]:
    begin, indent = f"{label:<{_LABEL}}", " " * _LABEL
    return textwrap.wrap(words, COLUMNS, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)


def to_json(plan: Plan) -> str:
    """Return a plan as JSON."""
    table = {
        "model": {name: getattr(plan.facts, name) for name in ("name", "num_parameters", "weight_bytes", "slot_bytes")},
        "batch": plan.facts.batch,
        "devices": plan.devices._asdict(),
        "seconds": plan.seconds,
        "budget_seconds": plan.budget_seconds,
        "rows": [_as_table(row, plan) for row in plan.rows],
        "not_measured": [{"layout": str(layout), "reason": reason} for layout, reason in plan.others],
        "not_considered": list(plan.not_considered),
        "command": plan.command,
    }
    return json.dumps(table, indent=2) + "\n"


def _as_table(row: Row, plan: Plan) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "layout": str(row.layout),
        "step_seconds": row.step_seconds,
        "spread_seconds": row.measured.spread_seconds,
        "laps_seconds": list(row.measured.laps),
        "examples_per_second": plan.facts.batch / row.step_seconds,
        "times_one": _times_one(row, plan),
        "memory_bytes": row.measured.memory_bytes,
        "settings": dict(row.settings),
    }


def html(plan: Plan) -> str:
    """Return a plan as HTML, for notebooks."""
    head = "".join(f'<th style="{_STYLE}">{name}</th>' for name in ("#", "layout", *_HEADINGS))
    rows = [(_number(row, plan), str(row.layout), *_cells(row, plan)) for row in plan.rows]
    body = "".join(
        "<tr>" + "".join(f'<td style="{_STYLE}">{markup.escape(cell)}</td>' for cell in cells) + "</tr>"
        for cells in rows
    )
    above = "".join(f"<div><b>{name}</b> {markup.escape(words)}</div>" for name, words in _head(plan).items())
    below = "".join(f"<div>{markup.escape(sentence)}</div>" for sentence in _sentences(plan))
    if plan.command:
        below = f"<div>Take 1: <code>{markup.escape(plan.command)}</code></div>{below}"
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"

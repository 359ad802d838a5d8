"""A plan as text of 80 columns, as JSON, and as a table for notebooks. Pure Python."""

from __future__ import annotations

import html as markup
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfpar.messages.number_format import figure, three_digits
from tfpar.messages.received import excerpt
from tfpar.planning.quantities import duration, memory, waits_in_words

if TYPE_CHECKING:
    from tfpar.planning.plan import Plan, Row

COLUMNS = 80
# Of the text alone, for a terminal of 40 lines: --json and notebooks have all rows.
MOST_FITTING, MOST_OTHERS = 8, 3
_LABEL, _NUMBER, _LAYOUT = 11, 4, 33
_LONGEST_NAME = 60  # of a model
_HEADINGS = ("step", "examples/s", "x one", "memory", "fits")
_WIDTHS = (9, 11, 7, 11, 5)
_FITS = {True: "yes", False: "no", None: "?"}
_STYLE = "text-align:left"
_MORE = " \\"  # the command continues


def text(plan: Plan) -> str:
    """Return a plan as text that fits 80 columns.

    Args:
        plan: The plan.
    """
    shown = _shown(plan)
    lines = [*_head(plan), "", _line("#", "layout", _HEADINGS)]
    for row in shown:
        lines.append(_line(_number(row, plan), str(row.layout), _cells(row, plan)))
        if remark := _remark(row):
            lines += _wrapped(remark, " " * _NUMBER, " " * _NUMBER)
    if num_hidden := len(plan.rows) - len(shown):
        more = f"{num_hidden} more rank no higher, or do not fit: --json and plan.rows have all."
        lines += _wrapped(more, " " * _NUMBER, " " * _NUMBER)
    lines += ["", *_foot(plan)]
    return "\n".join(line.rstrip() for line in lines)


def _shown(plan: Plan) -> list[Row]:
    """Return the rows of the text: the first, the nearest that do not fit, and one device, to which `x one` refers."""
    fitting = [row for row in plan.rows if row.fits is not False]
    places = {*range(len(fitting))[:MOST_FITTING], *range(len(plan.rows))[len(fitting) :][:MOST_OTHERS]}
    places |= {place for place, row in enumerate(plan.rows) if row.layout.num_devices == 1}
    return [plan.rows[place] for place in sorted(places)]


def _head(plan: Plan) -> Iterator[str]:
    yield from _labelled("model", _model(plan))
    yield from _labelled("batch", _batch(plan))
    yield from _labelled("measured", _measured(plan))


def _model(plan: Plan) -> str:
    model = plan.model
    return (
        f"{excerpt(model.name, _LONGEST_NAME)}, {model.num_parameters:,} parameters ({memory(model.weight_bytes)}; "
        f"optimizer {memory(model.slot_bytes)})"
    )


def _batch(plan: Plan) -> str:
    number = f"{plan.model.batch:,} example{'s' * (plan.model.batch != 1)}"
    if plan.model.normalizing and any(row.layout.num_devices > 1 for row in plan.rows):
        return f"{number}; normalization makes the rows differ, see below"
    return f"{number}; each row gives the same result"


def _measured(plan: Plan) -> str:
    return f"on {plan.machine.device} in {duration(plan.model.seconds)}; {plan.history}"


def _line(number: str, name: str, cells: Sequence[str]) -> str:
    """Return a row; a long name has a line of its own."""
    figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    if len(name) <= _LAYOUT:
        return f"{number:<{_NUMBER}}{name:<{_LAYOUT}}{figures}"
    return "\n".join([*_wrapped(name, f"{number:<{_NUMBER}}", " " * _NUMBER), " " * (_NUMBER + _LAYOUT) + figures])


def _number(row: Row, plan: Plan) -> str:
    """Return the rank of a row, with an equals sign where it is that of several."""
    if row.rank is None:
        return "-"
    return f"{row.rank}{'=' * (sum(other.rank == row.rank for other in plan.rows) > 1)}"


def _cells(row: Row, plan: Plan) -> tuple[str, ...]:
    return (
        duration(row.known_seconds),
        figure(round(row.examples_per_second)) if row.examples_per_second >= 10 else figure(row.examples_per_second),
        "" if row.times_one is None else _times(row.times_one),
        memory(row.memory_bytes),
        _FITS[row.fits],
    )


def _times(times: float) -> str:
    return "1" if f"{times:.2f}" == "1.00" else three_digits(times)


def _remark(row: Row) -> str:
    if row.lacks:
        return row.lacks
    waits = waits_in_words(row.waits, row.step_seconds)
    parts = [f"measured; predicted {duration(row.step_seconds)}"] if row.measured_seconds is not None else []
    parts += [f"waits for {waits}"] if waits else []
    return "; ".join(parts)


def _foot(plan: Plan) -> Iterator[str]:
    if plan.machine.memory_bytes is not None:
        yield from _wrapped(f"A device has {memory(plan.machine.memory_bytes)} of memory.", "", "")
    if plan.command:
        # Not wrapped at options, so that it can be copied; a shell reads it over several lines.
        yield from command_lines(f"Take {plan.rows[0].rank}:", plan.command)
    for sentence in _sentences(plan):
        yield from _wrapped(sentence, "", "")


def _sentences(plan: Plan) -> Iterator[str]:
    if plan.command and plan.taken is not None and plan.taken.layout.num_hosts > 1:
        yield (
            "Start it on each host, with the names or addresses of all hosts in place of HOST1,HOST2 and with the same "
            "TFPAR_JOB_SECRET."
        )
    if largest := _largest(plan):
        yield f"Largest global batch that fits: {largest}."
    yield from plan.notes
    if plan.not_considered:
        yield f"Not considered: {'; '.join(plan.not_considered)}."


def _largest(plan: Plan, most: int = 4) -> str:
    """Return the largest batches of the first rows, by rank where it is one row's alone."""
    ranks = [row.rank for row in plan.rows]
    found = [
        f"{row.rank if row.rank is not None and ranks.count(row.rank) == 1 else row.layout}: {row.largest_batch:,}"
        for row in plan.rows
        if row.fits and row.largest_batch
    ]
    return ", ".join(found[:most])


def command_lines(label: str, command: str) -> Iterator[str]:
    """Yield a command over several lines, as a shell reads it: broken before flags and within long words.

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
        yield from _pieces(line + _MORE * (number < len(lines)))


def _flags(command: str) -> Iterator[str]:
    """Yield the program, and each flag with its value, quoted for a shell."""
    words: list[str] = []
    for word in shlex.split(command):
        if word.startswith("--") and words:
            yield shlex.join(words)
            words = []
        words.append(word)
    yield shlex.join(words)


def _pieces(line: str) -> Iterator[str]:
    """Yield a line that is too long in pieces; a shell joins them, as each begins in the first column."""
    while len(line) > COLUMNS and "'\"'\"'" not in line:  # a quotation mark that is quoted
        is_quoted = line[: COLUMNS - 2].count("'") % 2 == 1
        cut = COLUMNS - 2 if is_quoted else COLUMNS - 1
        yield line[:cut] + "'" * is_quoted + "\\"
        line = "'" * is_quoted + line[cut:]
    yield line


def _labelled(label: str, words: str) -> list[str]:
    return _wrapped(words, f"{label:<{_LABEL}}", " " * _LABEL)


def _wrapped(words: str, begin: str, indent: str) -> list[str]:
    return textwrap.wrap(
        words, COLUMNS, initial_indent=begin, subsequent_indent=indent, break_long_words=True, break_on_hyphens=False
    )


def to_json(plan: Plan) -> str:
    """Return a plan as JSON.

    Args:
        plan: The plan.
    """
    return json.dumps(as_table(plan), indent=2) + "\n"


def as_table(plan: Plan) -> dict[str, Any]:
    """Return a plan as values that JSON has.

    Args:
        plan: The plan.
    """
    model, machine = plan.model, plan.machine
    return {
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "weight_bytes": model.weight_bytes,
            "slot_bytes": model.slot_bytes,
            "batch": model.batch,
        },
        "measured": {
            "device": machine.device,
            "num_devices": machine.num_devices,
            "num_measured": machine.num_measured,
            "num_hosts": machine.num_hosts,
            "memory_bytes": machine.memory_bytes,
            "runtime_bytes": machine.runtime_bytes,
            "assumed": list(machine.assumed),
            "seconds": model.seconds,
            "spread": model.spread,
            "history": plan.history,
        },
        "rows": [_as_table(row) for row in plan.rows],
        "take": None if plan.taken is None else str(plan.taken.layout),
        "command": plan.command,
        "notes": list(plan.notes),
        "largest_batches": plan.largest_batches,
        "not_considered": list(plan.not_considered),
    }


def _as_table(row: Row) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "layout": str(row.layout),
        "step_seconds": row.step_seconds,
        "measured_seconds": row.measured_seconds,
        "examples_per_second": row.examples_per_second,
        "times_one": row.times_one,
        "memory_bytes": row.memory_bytes,
        "fits": row.fits,
        "lacks": row.lacks,
        "largest_batch": row.largest_batch,
        "waits": dict(row.waits),
        "forward_seconds": row.forward_seconds,
        "settings": dict(row.settings),
    }


def html(plan: Plan) -> str:
    """Return a plan as a table for notebooks.

    Args:
        plan: The plan.
    """
    head = "".join(f'<th style="{_STYLE}">{name}</th>' for name in ("#", "layout", *_HEADINGS, ""))
    body = "".join(_html_row(row, plan) for row in plan.rows)
    labelled = {"model": _model(plan), "batch": _batch(plan), "measured": _measured(plan)}
    above = "".join(f"<div><b>{name}</b> {markup.escape(words)}</div>" for name, words in labelled.items())
    below = "".join(f"<div>{markup.escape(sentence)}</div>" for sentence in _sentences(plan))
    if plan.command:
        below = f"<div>Take {plan.rows[0].rank}: <code>{markup.escape(plan.command)}</code></div>{below}"
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"


def _html_row(row: Row, plan: Plan) -> str:
    cells = (_number(row, plan), str(row.layout), *_cells(row, plan), _remark(row))
    return "<tr>" + "".join(f'<td style="{_STYLE}">{markup.escape(cell)}</td>' for cell in cells) + "</tr>"

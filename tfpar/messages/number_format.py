"""Numbers and lines of text for the terminal."""

from __future__ import annotations

import math
import shutil
import textwrap
from typing import Any

LABEL_COLUMNS = 11
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: Any) -> str:
    """Return a number, or the numbers of a list, in about four digits.

    Example:
        >>> [figure(value) for value in (9738.7, 64, 0.0, 1.97482, 0.88244, 0.00012345, 2e-7)]
        ['9,739', '64', '0', '1.975', '0.8824', '0.000123', '2e-07']
    """
    if isinstance(value, list | tuple):
        return ", ".join(figure(item) for item in value)
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    size = abs(value)
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.{3 - int(math.log10(size))}f}"
    return f"{value:.4f}" if size >= 0.01 else f"{value:.3g}"


def counted(number: float, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "epoch"), counted(1500, "step")
        ('1 epoch', '1,500 steps')
    """
    return f"{figure(number)} {noun}{'' if number == 1 else 's'}"


def flops(number: float) -> str:
    """Return a number of floating-point operations with a decimal prefix.

    Example:
        >>> flops(2.56e10), flops(352)
        ('25.6 GFLOP', '352 FLOP')
    """
    return _with_prefix(number, "FLOP")


def memory(num_bytes: float) -> str:
    """Return a size in bytes with a decimal prefix, in three digits.

    Example:
        >>> memory(14_100_000_000), memory(475e6), memory(12)
        ('14.1 GB', '475 MB', '12 B')
    """
    return _with_prefix(num_bytes, "B")


def _with_prefix(number: float, unit: str) -> str:
    size, prefix = next((pair for pair in _PREFIXES if number >= pair[0]), (1.0, ""))
    return f"{three_digits(number / size) if prefix else f'{number:.0f}'} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Return a duration in seconds, milliseconds or microseconds, in three digits.

    Example:
        >>> duration(12.3), duration(0.2118), duration(0.00004)
        ('12.3 s', '212 ms', '40.0 us')
    """
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{three_digits(1e3 * seconds)} ms"
    return f"{three_digits(1e6 * seconds)} us"


def describe_flops(flops_per_step: float, mfu: float | None) -> str:
    """Return the model FLOPs of a step, and the MFU if it is known.

    Example:
        >>> describe_flops(2.56e10, 0.413), describe_flops(2.56e10, None)
        ('25.6 GFLOP a step, MFU 41.3 %', '25.6 GFLOP a step')
    """
    return f"{flops(flops_per_step)} a step" + ("" if mfu is None else f", MFU {100 * mfu:.1f} %")


def three_digits(value: float) -> str:
    """Return a nonnegative number in three digits, or all digits before the point if these are more.

    Example:
        >>> [three_digits(value) for value in (12345.6, 123.4, 99.96, 12.34, 0.1234, 0)]
        ['12,346', '123', '100', '12.3', '0.123', '0.000']
    """
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{decimals}f}"


def line(label: str, text: str, label_columns: int = LABEL_COLUMNS) -> str:
    """Return a label and its text, which begins at `label_columns` and is wrapped to the width of the terminal.

    Example:
        >>> line("batch", "64 examples")
        'batch      64 examples'
    """
    return textwrap.fill(
        text,
        max(shutil.get_terminal_size().columns, 2 * label_columns),
        initial_indent=f"{label:{label_columns}}",
        subsequent_indent=" " * label_columns,
        break_long_words=False,
        break_on_hyphens=False,
    )

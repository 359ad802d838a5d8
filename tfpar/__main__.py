"""`python -m tfpar`: list the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfpar.commands import command_line
from tfpar.messages.received import quoted
from tfpar.messages.suggestions import closest


def main(arguments: Sequence[str]) -> int:
    """Print the commands, or the versions.

    Args:
        arguments: The words after `python -m tfpar`.

    Returns:
        The exit code: 0, or 1 after an unknown argument.
    """
    if arguments and arguments[0] in ("--version", "-V"):
        print(command_line.version())
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        names = {name.removeprefix("tfpar."): name for name in command_line.COMMANDS}
        near = names.get(closest(arguments[0], names) or "", "tfpar")
        print(
            f"error: python -m tfpar lists the commands and takes no arguments, received {quoted(arguments[0])}. "
            f"Write python -m {near}.",
            file=sys.stderr,
        )
        return 1
    rows = [(f"python -m {name}", summary) for name, summary in command_line.COMMANDS.items()]
    print(
        f"{command_line.version()}\n\n{command_line.two_columns(rows)}\n\nEach command explains its flags with --help."
    )
    return 0


if __name__ == "__main__":
    command_line.run_plain(lambda: main(sys.argv[1:]))

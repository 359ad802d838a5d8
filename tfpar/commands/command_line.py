"""Help, version, flags and exit codes of all commands, on top of absl's flags."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import io
import os
import platform
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from absl import app, flags
from absl.flags import FLAGS, FlagValues

import tfpar
from tfpar.commands import start_up
from tfpar.messages.reasons import without_control_sequences
from tfpar.messages.received import COLUMNS, excerpt, quoted
from tfpar.messages.suggestions import closest

COMMANDS = {
    "tfpar.train": "Train a run from its configuration; the same command again resumes it.",
    "tfpar.plan": "Train the layouts that a model could have for some steps each, and rank them.",
    "tfpar.doctor": "Examine this machine, its devices, a model, and the network between workers.",
    "tfpar.report": "Write the report of a run again, or compare several runs.",
    "tfpar.launch": "Start the workers of a job on this machine, or print a script or manifest for a cluster.",
}
_MOST_COLUMNS = 100
FAILED = 1
REPEATABLE = 2  # a worker would fail in the same way after a restart; argparse uses it too
OTHER_FAILED = 3  # a worker ended because another one failed
UNREAD = 141  # 128 + SIGPIPE, as shells report it
_LONGEST_NAME = 60  # of a flag


def _no_way_out(flag: str) -> str:
    return ""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command and its help.

    Args:
        name: The module to run, one of `COMMANDS`.
        usage: The arguments, such as "[--config CONFIG] [--trace]"; one line per form.
        flags: The placeholder of each flag's value, by name; empty for a boolean flag.
        examples: Complete command lines.
        details: Returns the end of the help text.
        way_out: Returns a hint for an unknown flag, with a leading space. Defaults to none.
        values: The flag values. Commands that define the same flag need their own; the default is absl's global one.
        error_code: The exit code for invalid flags. Defaults to `repeatable_error_code`.
    """

    name: str
    usage: Sequence[str]
    flags: Mapping[str, str]
    examples: Sequence[str]
    details: Callable[[], str] = str
    way_out: Callable[[str], str] = _no_way_out
    values: FlagValues = FLAGS
    error_code: int | None = None


def parse(command: Command, arguments: Sequence[str]) -> list[str]:
    """Parse a command line, as the flags parser of `absl.app.run`.

    It prints help and version, and reports an error as one sentence on standard error.

    Args:
        command: The command.
        arguments: The program name and its arguments; those after `--` are not flags.

    Returns:
        The program name and the arguments that are not flags.

    Raises:
        SystemExit: After help or version with code 0, after an error with that of the command.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    asked = set(arguments[1:end])
    for word in arguments[1:end]:
        name = word.partition("=")[0].lstrip("-")
        # absl's search for similar flags takes time and recursion depth that grow with the name, and it reads flag
        # files of any size.
        if word.startswith("-") and (len(name) > _LONGEST_NAME or name in ("flagfile", "undefok")):
            _refuse(command, f"{excerpt(word.partition('=')[0])} is no flag.")
    if asked & {"-h", "-help", "--help", "-?"}:
        print(help_text(command))
        raise SystemExit(0)
    if asked & {"--version", "-version", "-V"}:
        print(version())
        raise SystemExit(0)
    try:
        if command.values is not flags.FLAGS:
            flags.FLAGS(arguments[:1])  # absl's own flags must be parsed too
        return [*command.values(arguments[:end]), *arguments[end + 1 :]]
    except flags.Error as error:
        _refuse(command, _sentence(command, error))


def _refuse(command: Command, sentence: str) -> NoReturn:
    print(f"error: {sentence} See python -m {command.name} --help.", file=sys.stderr)
    code = command.error_code
    raise SystemExit(repeatable_error_code(os.environ) if code is None else code) from None


def error_lines(text: str) -> list[str]:
    r"""Return the lines that report an error, without empty lines and the colours of Keras' messages.

    Args:
        text: The message.

    Example:
        >>> error_lines("\x1b[1mBad input.\x1b[0m\n\nArguments received:\n")
        ['error: Bad input.', 'error: Arguments received:']
    """
    return [f"error: {line}" for line in without_control_sequences(text).splitlines() if line.strip()]


def repeatable_error_code(environment: Mapping[str, str]) -> int:
    """Return the exit code for errors in flags, configuration or data, which would recur after a restart.

    For a worker, it differs from that of other failures, so that the launcher does not restart it.

    Args:
        environment: Environment variables, such as `os.environ`.

    Example:
        >>> repeatable_error_code({}), repeatable_error_code({"TF_CONFIG": "{}"})
        (1, 2)
    """
    return REPEATABLE if "TF_CONFIG" in environment or "SLURM_STEP_ID" in environment else FAILED


def run(
    main: Callable[[list[str]], int], flags_parser: Callable[[Sequence[str]], list[str]], bug_code: int = FAILED
) -> NoReturn:
    """Run a command and exit. Only unexpected exceptions print a traceback.

    Args:
        main: Runs the command and returns the exit code.
        flags_parser: Parses the flags and returns the other arguments.
        bug_code: The exit code for unexpected exceptions, of tfpar or of user code.

    Raises:
        SystemExit: With the code of `main`, 130 after Ctrl-C, or 141 if the reader of the output is gone.
    """
    run_plain(lambda: app.run(main, flags_parser=flags_parser), bug_code)


def run_plain(main: Callable[[], int], bug_code: int = FAILED) -> NoReturn:
    """Do the same as `run` for a command without flags."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = interruptible(lambda: _exit_code(main))
        sys.stdout.flush()
    except Exception as error:
        code = bug_code
        if isinstance(error, BrokenPipeError) and _is_unread():  # as after `| head -1`
            code = UNREAD
            _drop_output()
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(f"error: {error}", file=sys.stderr)
            _drop_output()
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    start_up.ended()
    raise SystemExit(code)


def _is_unread() -> bool:
    """Return whether the broken pipe is standard output, not another pipe or socket."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _drop_output() -> None:
    """Discard buffered output, which Python would try to write again at exit, with the same error."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())


def interruptible(main: Callable[[], int]) -> int:
    """Run a function and return its exit code, or 130 after Ctrl-C.

    Example:
        >>> interruptible(lambda: 0)
        0
    """
    try:
        return main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return start_up.INTERRUPTED


def _exit_code(main: Callable[[], int]) -> int:
    try:
        start_up.imported()
        return main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)  # sys.exit("...") prints its argument
        return FAILED


def _sentence(command: Command, error: flags.Error) -> str:
    if isinstance(error, flags.UnrecognizedFlagError):
        near = closest(error.flagname, command.flags)
        way_out = command.way_out(error.flagname) or (f" Did you mean --{near}?" if near else "")
        return f"--{excerpt(error.flagname)} is no flag.{way_out}"
    if refused := re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL):
        name, value = refused.groups()
        allowed = command.values[name].parser.syntactic_help or "true or false"
        return f"--{name} must be {allowed}, received {quoted(value)}."
    if lacking := re.match(r"Missing value for flag -*(\w+)", str(error)):
        return f"--{lacking[1]} needs a value."
    return f"{excerpt(str(error).rstrip('.'), 2 * COLUMNS)}."


def help_text(command: Command) -> str:
    """Return the text of `--help`: summary, usage, flags, examples, details."""
    common = [("-h, --help", "Print this and exit."), ("--version", "Print the versions and exit.")]
    calls = [f"python -m {command.name} {usage}" for usage in command.usage]
    parts = [
        textwrap.fill(COMMANDS[command.name], _columns()),
        "usage: " + "\n       ".join(calls),
        two_columns([*common, *meanings(command)]),
        "examples:\n" + "\n".join(f"  {example}" for example in command.examples),
        command.details(),
    ]
    return "\n\n".join(part for part in parts if part)


def meanings(command: Command) -> list[tuple[str, str]]:
    """Return each flag of a command, with its placeholder, and its help text."""
    # absl appends a note to the help of a repeatable flag, after a semicolon.
    texts = {name: (command.values[name].help or "").partition(";\n")[0] for name in command.flags}
    return [(f"--{name} {placeholder}".rstrip(), texts[name]) for name, placeholder in command.flags.items()]


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and their descriptions to fit the terminal.

    Example:
        >>> print(two_columns([("--trace", "Measure."), ("--config CONFIG", "Read.")]))
          --trace          Measure.
          --config CONFIG  Read.
    """
    indent = max(len(name) for name, _ in rows) + 4
    return "\n".join(
        textwrap.fill(
            text,
            _columns(),
            initial_indent=f"  {name:{indent - 2}}",
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )


def _columns() -> int:
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns)


def version() -> str:
    """Return the versions of tfpar, TensorFlow, Keras and Python, without importing them.

    Example:
        >>> version().split()[0]
        'tfpar'
    """
    return (
        f"tfpar {tfpar.__version__} (TensorFlow {_installed('tensorflow')}, Keras {_installed('keras')}, "
        f"Python {platform.python_version()})"
    )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

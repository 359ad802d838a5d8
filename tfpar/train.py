"""`python -m tfpar.train`: train a run from its configuration, or resume it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shlex
import sys
from pathlib import Path

from absl import flags

from tfpar import config
from tfpar.cluster import tf_config
from tfpar.cluster.other_worker_error import OtherWorkerError
from tfpar.commands import command_line, start_up, xla_cache
from tfpar.commands.number_flags import Integer, check_within
from tfpar.commands.path_flags import FilePath
from tfpar.config import bundled_configurations
from tfpar.messages import received
from tfpar.messages.reasons import message_of
from tfpar.messages.received import excerpt, quoted
from tfpar.messages.suggestions import closest
from tfpar.runs.directory import RunDirectory
from tfpar.runs.reporting import summary

_CONFIG = flags.DEFINE(
    FilePath(),
    "config",
    None,
    "Name below, or a TOML file of your own; by default that of the run in --directory, or the settings of digits.",
)
_SET = flags.DEFINE_multi_string("set", [], "Change one setting; may be repeated.")
_DIRECTORY = flags.DEFINE(
    FilePath(), "directory", None, "Folder of the run; by default runs/<name of the configuration>, or runs/default."
)
_PRINT_CONFIG = flags.DEFINE_bool(
    "print_config", False, "Print the complete configuration and exit, without TensorFlow."
)
_AUDIT = flags.DEFINE(
    Integer(), "audit", None, "Count the examples that each of so many workers would read in an epoch, and exit."
)
_TRACE = flags.DEFINE_bool("trace", False, "Measure when each action of a pipeline runs, and draw it below the plan.")
_PROFILE = flags.DEFINE(
    Integer(), "profile", None, "Record so many steps with TensorFlow's profiler, for the profile page of TensorBoard."
)

MAX_AUDITED = 4096  # workers
MAX_PROFILED = 1000  # steps


def _details() -> str:
    configurations = [(name, bundled_configurations.describe(name)) for name in bundled_configurations.names()]
    return f"""configurations:
{command_line.two_columns(configurations)}

Without --config the settings are those of the run that --directory holds, or
else those of digits. To see every setting, or to write a file of your own:
  python -m tfpar.train --config digits --print_config > my_run.toml"""


def _way_out(flag: str) -> str:
    """Return how to write a setting that was passed as a flag."""
    key = config.closest_key(flag)
    own = closest(flag, COMMAND.flags)
    if key is None or (own is not None and key.rpartition(".")[2] != flag):
        return ""
    return f" A setting is changed with --set: did you mean --set {key}=...?"


COMMAND = command_line.Command(
    name="tfpar.train",
    usage=["[FLAG ...]"],
    flags={
        "config": "CONFIG",
        "set": "SECTION.SETTING=VALUE",
        "directory": "FOLDER",
        "print_config": "",
        "audit": "WORKERS",
        "trace": "",
        "profile": "STEPS",
    },
    examples=[
        "python -m tfpar.train",
        "python -m tfpar.train --directory runs/default --set training.epochs=20",
        "python -m tfpar.train --config digits_mirrored --set training.epochs=2",
    ],
    details=_details,
    way_out=_way_out,
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: The command line without the flags that absl has parsed.

    Returns:
        The exit code: 0 when trained, 1 on an error (2 for a worker if a restart would fail too, 3 if
        another worker failed), 130 when interrupted, with a checkpoint to resume from.
    """
    directory: RunDirectory | None = None
    try:
        if len(argv) > 1:
            raise ValueError(_unexpected_argument(argv[1]))
        file = None if _CONFIG.value is None else bundled_configurations.find(_CONFIG.value)
        directory = RunDirectory(_run_folder(file))
        if file is None and _DIRECTORY.value is not None:
            file = directory.recorded()
        run = config.load(file, _SET.value)
        if _PROFILE.value is not None:
            check_within("profile", _PROFILE.value, 1, MAX_PROFILED)
        if _PRINT_CONFIG.value:
            print(config.dump(run), end="")
            return 0
        if _AUDIT.value is not None:
            check_within("audit", _AUDIT.value, 1, MAX_AUDITED)
            return _audit(run, _AUDIT.value)
        job = tf_config.from_environment(os.environ)
        if job is not None and job.role == "evaluator":
            return _evaluate(run, directory)
        if job is not None and job.num_workers > 1:
            tf_config.check_port_free(job)
        is_chief = job is None or job.is_chief
        if is_chief:
            directory.claim(run)
        alone = job is None or job.num_workers == 1
        if alone and (results := directory.finished(run)) is not None:  # no need to wait for TensorFlow
            print(summary.already_trained(directory, results))
            return 0
        return _train(run, directory, is_chief)
    except BrokenPipeError:  # handled by `command_line.run`
        _report(directory)
        raise
    except Exception as error:
        sentence = _sentence(error, _DIRECTORY.value, directory)
        if sentence is None:
            _report(directory)
            raise
        print("\n".join(command_line.error_lines(sentence)), file=sys.stderr, flush=True)
        _report(directory)
        if isinstance(error, OtherWorkerError):
            return command_line.OTHER_FAILED
        is_repeatable = isinstance(error, ValueError | TypeError | ImportError | FileNotFoundError)
        if is_repeatable and directory is not None:
            directory.undo_claim()
        return command_line.repeatable_error_code(os.environ) if is_repeatable else command_line.FAILED


def _report(directory: RunDirectory | None) -> None:
    """Write the report of a failed run, if possible."""
    if directory is not None and directory.lacks_report:
        from tfpar.reports import events, report_files

        with contextlib.suppress(Exception):  # the error of the run is printed already
            report_files.write(directory.path, status=events.FAILED)


def _run_folder(file: Path | None) -> Path:
    """Return the folder of the run; raise an error if the system cannot have a path of that name."""
    name = _DIRECTORY.value
    if name is not None and not name.strip():
        raise ValueError("--directory must name a folder, received an empty name. Leave it out for runs/<config>.")
    folder = Path("runs", file.stem if file else "default") if name is None else Path(name)
    try:
        os.stat(folder)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            subject = "--directory" if name is not None else "The folder of the run"
            raise ValueError(
                f"{subject} must be a path that the system can have, received {received.path(folder)}: "
                f"{os.strerror(error.errno)}."
            ) from None
    return folder


def _unexpected_argument(word: str) -> str:
    is_configuration = word in bundled_configurations.names() or word.endswith(".toml")
    flag = "set" if "=" in word else "config" if is_configuration else None
    way_out = f"Did you mean --{flag} {excerpt(word)}?" if flag else "See python -m tfpar.train --help."
    return f"Arguments must be flags, received {quoted(word)}. {way_out}"


def _train(run: config.Run, directory: RunDirectory, is_chief: bool) -> int:
    from tfpar import cluster

    # Workers other than the chief may have no disk to write to.
    if is_chief:
        xla_cache.keep_in(directory.compilations)
    messages = cluster.native_messages_to(directory.native_log if is_chief else Path(os.devnull))
    with messages:
        with start_up.importing():
            from tfpar.runs import train_run

        trained = train_run.train(run, directory, trace=_TRACE.value, profile_steps=_PROFILE.value or 0)
    if not trained and is_chief:
        command = shlex.join(["python", "-m", "tfpar.train", *sys.argv[1:]])
        print(f"Resume with the same command:\n  {command}")
    return 0 if trained else start_up.INTERRUPTED


def _audit(run: config.Run, num_workers: int) -> int:
    from tfpar import cluster

    with cluster.native_messages_to(Path(os.devnull)):
        with start_up.importing():
            from tfpar.runs import train_run

        return 0 if train_run.audit(run, num_workers) else 1


def _evaluate(run: config.Run, directory: RunDirectory) -> int:
    from tfpar import cluster

    with cluster.native_messages_to(Path(os.devnull)):
        with start_up.importing():
            from tfpar.runs import evaluate_run

        return 0 if evaluate_run.evaluate_checkpoints(run, directory) else start_up.INTERRUPTED


def _sentence(error: Exception, directory_flag: str | None, directory: RunDirectory | None) -> str | None:
    """Return the message of a user's error; None for an error of tfpar, which needs its traceback.

    Args:
        error: The error.
        directory_flag: The value of `--directory`.
        directory: The folder of the run; None if it is not known yet.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        is_begun = directory is not None and any(directory.checkpoints.glob("*.npz"))
        resumes = "it resumes from the last checkpoint" if is_begun else "it starts from the beginning"
        return (
            f"The disk must have room for the run, and {error.filename or 'a file of the run'} could not be written: "
            f"{os.strerror(error.errno)}. Free some space and repeat the command: {resumes}."
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name = os.fsdecode(error.filename)
        is_in_run = name.startswith(directory_flag or "runs")
        way_out = "Choose a --directory that can be written." if is_in_run else "Correct the path, or its permissions."
        return f"{received.path(name)}: {os.strerror(error.errno)}. {way_out}"
    if isinstance(error, ValueError | TypeError | OSError | FloatingPointError | ImportError | MemoryError):
        return "\n".join([message_of(error), *getattr(error, "__notes__", ())]) or None
    return None


def run() -> None:
    """Entry point of the console script `tfpar-train`."""
    command_line.run(main, functools.partial(command_line.parse, COMMAND))


if __name__ == "__main__":
    run()

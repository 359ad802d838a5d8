"""`python -m tfpar.doctor`: examine this machine, its devices, a model and the network between workers.

python -m tfpar.doctor                                     this machine and its devices
python -m tfpar.doctor --config digits                     and a configured model
python -m tfpar.doctor --model train.py:build_model        and a model of your own
python -m tfpar.doctor --num_workers 2                     and the network between workers of this machine
python -m tfpar.launch --num_workers 2 --hosts a,b -- -m tfpar.doctor         between machines; the same command on each
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys

from absl import flags

from tfpar.checks import workers
from tfpar.checks.doctor import doctor, examine
from tfpar.checks.models import ModelSource
from tfpar.checks.report import exit_code, reported
from tfpar.cluster import job_secret, tf_config
from tfpar.commands import callable_module, command_line
from tfpar.commands.number_flags import Integer, check_within
from tfpar.commands.path_flags import FilePath
from tfpar.config import bundled_configurations
from tfpar.messages.received import quoted

_VALUES: flags.FlagValues = flags.FlagValues()  # type: ignore[no-untyped-call]  # other commands have flags of the same names
_CONFIG = flags.DEFINE(
    FilePath(),
    "config",
    None,
    "Also examine the model of this configuration: a name, or a TOML file.",
    flag_values=_VALUES,
)
_SET = flags.DEFINE_multi_string("set", [], "Change one setting; may be repeated.", flag_values=_VALUES)
_MODEL = flags.DEFINE_string(
    "model", None, "Also examine the model of this function: file.py:function, or module:function.", flag_values=_VALUES
)
_DATA = flags.DEFINE_string(
    "data", None, "With --model: the function that returns its dataset; by default a batch is made up.",
    flag_values=_VALUES,
)  # fmt: skip
_NUM_WORKERS = flags.DEFINE(
    Integer(),
    "num_workers",
    1,
    "Also start so many workers on this machine, and examine the network between them; by default none.",
    flag_values=_VALUES,
)
_JSON = flags.DEFINE_bool("json", False, "Print the results as JSON.", flag_values=_VALUES)
_LOGICAL_CPUS = flags.DEFINE(
    Integer(),
    "logical_cpus",
    2,
    "Without GPUs: number of devices into which the CPU is split; by default 2.",
    flag_values=_VALUES,
)
MOST_LOGICAL_CPUS, MOST_WORKERS = 64, 64
COMMAND = command_line.Command(
    name="tfpar.doctor",
    usage=["[FLAG ...]"],
    flags={
        "config": "CONFIG",
        "set": "SECTION.SETTING=VALUE",
        "model": "FUNCTION",
        "data": "FUNCTION",
        "num_workers": "N",
        "logical_cpus": "N",
        "json": "",
    },
    examples=[
        "python -m tfpar.doctor",
        "python -m tfpar.doctor --config digits",
        "python -m tfpar.doctor --model train.py:build_model --json > doctor.json",
        "python -m tfpar.launch --num_workers 2 --hosts a,b -- -m tfpar.doctor",
    ],
    details=lambda: (
        "In a job of several workers, each of which runs the command, only the network\nbetween them is examined.\n\n"
        "Exit code 0: all is well; 1: something is slow; 2: something is wrong."
    ),
    values=_VALUES,
    error_code=2,
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: The command line without the flags that absl has parsed.

    Returns:
        The exit code: 0 if all is well, 1 if something is slow, 2 if something or a flag is wrong, 130 when
        interrupted.
    """
    try:
        if len(argv) > 1:
            raise ValueError(f"Arguments must be flags, received {quoted(argv[1])}. See python -m tfpar.doctor --help.")
        job = tf_config.from_environment(os.environ)
        if job is not None and job.num_workers > 1:
            return _in_job(job)
        check_within("logical_cpus", _LOGICAL_CPUS.value, 1, MOST_LOGICAL_CPUS)
        check_within("num_workers", _NUM_WORKERS.value, 1, MOST_WORKERS)
        code = exit_code(reported(examine(_LOGICAL_CPUS.value, _source(), _NUM_WORKERS.value), _output()))
        if multiprocessing.active_children():  # Python would wait for them; one that hangs in a driver never ends
            sys.stdout.flush()
            os._exit(code)
        return code
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print("\n".join(command_line.error_lines(str(error))), file=sys.stderr)
        return 2


def _output() -> str:
    return "json" if _JSON.value else "text"


def _in_job(job: tf_config.JobConfig) -> int:
    """Examine the network between the workers of a job, each of which runs this command; the chief reports."""
    if _CONFIG.value or _MODEL.value or _NUM_WORKERS.value > 1:
        raise ValueError(
            "In a job of several workers the doctor examines the network between them. Leave out --config, --model and "
            "--num_workers, and examine each machine by itself, without TF_CONFIG."
        )
    secret = job_secret.from_environment(os.environ)
    if job.role == "evaluator":
        return 0
    if job.rank == 0:
        return exit_code(reported(workers.check(job, secret), _output()))
    if workers.serve(job, secret):
        return 0
    raise ValueError(
        f"The chief at {job.addresses[0]} has not ended the examination within {workers.SERVE_SECONDS:g} s."
    )


callable_module.make_callable(__name__, lambda: doctor)


def _source() -> ModelSource | None:
    if _MODEL.value is not None and _CONFIG.value is not None:
        raise ValueError("--model and --config each name a model. Leave one of them out.")
    if _DATA.value is not None and _MODEL.value is None:
        raise ValueError("--data needs --model, which is not set. Add --model, or use the data of --config.")
    if _MODEL.value is not None:
        return ModelSource(None, tuple(_SET.value), _MODEL.value, _DATA.value or "")
    if _CONFIG.value is not None:
        return ModelSource(str(bundled_configurations.find(_CONFIG.value)), tuple(_SET.value))
    if _SET.value:
        raise ValueError("--set changes a setting of --config, which is not set. Add --config.")
    return None


def run() -> None:
    """Entry point of the console script `tfpar-doctor`."""
    command_line.run(main, functools.partial(command_line.parse, COMMAND), bug_code=2)


if __name__ == "__main__":
    run()

"""The program of a child process of the doctor: one task, its result as a file.

The process ends with the doctor, and a little after its time limit in any case.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from tfpar.commands import parent_process
from tfpar.messages import users_code
from tfpar.messages.reasons import message_of

# The module of a task, imported in the child only: all of them need TensorFlow.
_MODULES = {
    "see": "sight_task",
    "examine": "device_task",
    "measure": "together_task",
    "step": "model_task",
    "compare": "strategy_task",
    "place": "placement_task",
}
_folder: list[Path] = []
_LONGEST_MESSAGE = 400
_SPARE_SECONDS = 5


def at_stage(name: str) -> None:
    """Note what the task does next, for the case that it never ends."""
    if _folder:
        (_folder[-1] / "stage").write_text(name)


def main() -> None:
    """Run the task that the first argument describes."""
    parent_process.end_with_parent()
    given = json.loads(sys.argv[1])
    _folder.append(Path(given["folder"]))
    signal.alarm(int(given["seconds"]) + _SPARE_SECONDS)
    try:
        found = {"result": _run(given)}
    except (Exception, SystemExit) as error:  # a script of a user may read flags, and exit
        found = {"problem": _message(error), "place": users_code.users_place(error)}
    unfinished = _folder[-1] / "unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(_folder[-1] / "result")


def _run(given: dict[str, Any]) -> Any:
    at_stage("the start of TensorFlow")
    import tfpar

    if given["num_cpus"] > 1:
        tfpar.use_logical_cpus(given["num_cpus"])
    module = importlib.import_module(f"tfpar.checks.{_MODULES[given['task']]}")
    return getattr(module, given["task"])(**given["arguments"])


def _message(error: BaseException) -> str:
    text = " ".join(message_of(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_MESSAGE]}"


if __name__ == "__main__":
    main()

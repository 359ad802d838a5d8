"""The output of the train command for a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.messages.number_format import LABEL_COLUMNS, counted, describe_flops, figure, line
from tfpar.runs.directory import RunDirectory

_COUNTS = ("epochs", "steps", "weights_of_epoch")
_SPEED = ("examples_per_second", "step_milliseconds", "data_wait_share")
_FLOPS = ("flops_per_step", "mfu")


def already_trained(directory: RunDirectory, results: Mapping[str, Any]) -> str:
    """Return the text for a run that is already complete."""
    sentence = (
        f"{directory.path} is trained to its end already. To train it longer, set a larger training.epochs; to train "
        "another run, choose another --directory."
    )
    return f"{line('', sentence, 0)}\n\n{summary(directory, results)}"


def written_again(names: Sequence[str]) -> str:
    """Return the text for a finished run whose files `names` are missing or changed."""
    verb = "is" if len(names) == 1 else "are"
    return f"This run was trained to its end, but {' and '.join(names)} {verb} missing or changed: written again."


def summary(directory: RunDirectory, results: Mapping[str, Any]) -> str:
    """Return the epochs, metrics, speed and files of a run as text.

    Args:
        directory: The run directory.
        results: The content of `results.json`.
    """
    metrics = {name: value for name, value in results.items() if name not in (*_COUNTS, *_SPEED, *_FLOPS)}
    rows = {"trained": f"{counted(results['epochs'], 'epoch')}, {counted(results['steps'], 'step')}"}
    if "weights_of_epoch" in results:
        rows["trained"] += f"; the weights are those of epoch {results['weights_of_epoch']}"
    for name, value in sorted(metrics.items(), key=lambda item: item[0] != "loss"):
        if not name.startswith("val_"):
            validation = metrics.get(f"val_{name}")
            rows[name] = figure(value) + ("" if validation is None else f", in validation {figure(validation)}")
        elif name.removeprefix("val_") not in metrics:
            rows[name] = figure(value)
    if speed := _speed(results):
        rows["speed"] = speed
    if "flops_per_step" in results:
        rows["FLOPs"] = describe_flops(results["flops_per_step"], results.get("mfu"))
    logs = [directory.metrics, *([directory.tensorboard] if directory.tensorboard.exists() else [])]
    rows |= {
        "model": f"{directory.model}, for keras.models.load_model",
        **({"best": str(directory.best)} if directory.best.exists() else {}),
        **({"report": str(directory.report)} if directory.report.exists() else {}),
        "logs": ", ".join(map(str, logs)),
        "state": str(directory.checkpoints),
    }
    columns = max(LABEL_COLUMNS, 2 + max(map(len, rows)))
    return "\n".join(line(name, text, columns) for name, text in rows.items())


def _speed(results: Mapping[str, Any]) -> str:
    examples, milliseconds, share = (results.get(name) for name in _SPEED)
    words = []
    if examples is not None:
        words.append(f"{figure(round(examples))} examples/s")
    if milliseconds is not None:
        words.append(f"{figure(milliseconds)} ms a step")
    if share is not None:
        words.append(f"{100 * share:.0f} % of it waiting for data")
    return ", ".join(words)

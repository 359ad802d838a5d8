"""The JSON file of a run: written after each round, and resumed from there."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Experiment, Output, Result, Round, is_number
from tfpar.files import atomic_file

# What may differ between two runs whose rounds are put together.
_CHANGING = "load_of_the_last_minute"


class ResultFile:
    """The results of a run on disk.

    Args:
        path: The file; None to keep nothing. It is written at once, so that a bad path shows before anything is
            measured.
        machine: From `benchmarks.machine.describe_machine`.
        resume: Whether to keep the rounds that the file holds; otherwise the file is replaced.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the file to resume is not one of results, or of another machine or other versions.
    """

    def __init__(self, path: Path | None, machine: Mapping[str, Any], resume: bool = False) -> None:
        self._path, self._machine = path, machine
        self._entries: dict[str, dict[str, Any]] = {}
        if resume and path is not None and path.exists():
            self._read(path)
        self._write()

    def _read(self, path: Path) -> None:
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            machine, entries = held["machine"], {entry["name"]: entry for entry in held["experiments"]}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} holds no results to resume: {error!r}. Leave --resume out to replace it."
            ) from None
        for name, value in self._machine.items():
            if name != _CHANGING and machine.get(name) != value:
                raise ValueError(
                    f"{path} holds results with {name} = {machine.get(name)!r}, and here it is {value!r}. Rounds of "
                    "both cannot be compared: give another file, or leave --resume out to replace this one."
                )
        self._entries = entries

    def rounds_of(self, experiment: Experiment) -> list[Round]:
        """Return the finished rounds that the file holds of an experiment.

        Args:
            experiment: What is measured now.

        Raises:
            ValueError: If the file holds rounds of other settings.
        """
        entry = self._entries.get(experiment.name)
        if entry is None:
            return []
        if {name: held["setting"] for name, held in entry["settings"].items()} != _settings(experiment):
            raise ValueError(
                f"{self._path} holds rounds of {experiment.name} with other settings, which cannot be put together "
                "with those of today: give another file, or leave --resume out to replace this one."
            )
        by_setting = {name: held["rounds"] for name, held in entry["settings"].items()}
        num_rounds = min(len(outputs) for outputs in by_setting.values())
        return [{name: outputs[number] for name, outputs in by_setting.items()} for number in range(num_rounds)]

    def save(self, result: Result) -> None:
        """Write the result of an experiment in place of that before, next to those of the others.

        Args:
            result: At least one round.

        Raises:
            OSError: If the file cannot be written.
        """
        self._entries[result.experiment.name] = as_json(result)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            text = json.dumps({"machine": self._machine, "experiments": list(self._entries.values())}, indent=2)
            atomic_file.write(self._path, text + "\n")


def as_json(result: Result) -> dict[str, Any]:
    """Return a result as JSON holds it.

    Args:
        result: At least one round.
    """
    experiment = result.experiment
    return {
        "name": experiment.name,
        "summary": experiment.summary,
        "figure": experiment.figure,
        "settings": {
            name: {
                "setting": setting,
                "medians": _medians([outputs[name] for outputs in result.rounds]),
                "rounds": [dict(outputs[name]) for outputs in result.rounds],
            }
            for name, setting in _settings(experiment).items()
        },
        "findings": [
            {
                "text": finding.text,
                "value": result.found(finding),
                "rounds": [finding.of(outputs) for outputs in result.rounds],
                "at_least": finding.at_least,
                "at_most": finding.at_most,
                "met": result.met(finding),
            }
            for finding in result.findings
        ],
    }


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of an experiment as they are read from a file."""
    settings = {name: dataclasses.asdict(setting) for name, setting in experiment.settings.items()}
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _medians(outputs: Sequence[Output]) -> dict[str, float]:
    """Return the medians of the figures that are numbers in every round."""
    return {
        figure: statistics.median(output[figure] for output in outputs)
        for figure in outputs[0]
        if all(is_number(output.get(figure)) for output in outputs)
    }

"""Recording of a run: its facts and events, and the report at its end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tfpar import config
from tfpar.callbacks import Throughput
from tfpar.files import atomic_file
from tfpar.messages.number_format import line
from tfpar.messages.reasons import message_of
from tfpar.messages.received import excerpt
from tfpar.reports import events, timelines
from tfpar.reports.recorded_run import RECORD
from tfpar.reports.timelines import PipelineRecord
from tfpar.runs.directory import RunDirectory
from tfpar.runs.reporting import run_facts
from tfpar.runs.reporting.phase_clock import PhaseClock
from tfpar.runs.run_trainer import RunTrainer

# If a run fails with one of these before its first epoch or checkpoint, the train command removes its folder.
_REPEATABLE = (ValueError, TypeError, ImportError, FileNotFoundError)


class RunReporter:
    """Record a run in its directory, and write its report at the end. Errors here never make the run fail.

    After a failure, the train command writes the report once the error is printed, since other workers may end the
    process. Only the chief calls `begin`; on other workers, the other methods do nothing.

    Args:
        run: The run.
        directory: The claimed run directory.

    Example:
        >>> reporter = RunReporter(config.Run(), RunDirectory("runs/digits"))
        >>> reporter.end(events.TRAINED)
    """

    def __init__(self, run: config.Run, directory: RunDirectory) -> None:
        self._run, self._directory = run, directory
        self._trainer: RunTrainer | None = None
        self._clock: PhaseClock | None = None
        self._pipeline: Mapping[str, Any] = {}
        self._has_ended = False

    def begin(self, trainer: RunTrainer, resumed: str, pipeline: Mapping[str, str | PipelineRecord]) -> None:
        """Record the start of training.

        Args:
            trainer: The trainer of the run.
            resumed: Where the run resumes, as a sentence; empty for a new run.
            pipeline: The "table" of stages and the "record" of a step, for a pipeline.
        """
        self._trainer, self._pipeline = trainer, pipeline
        events.append(self._directory.path, events.RESUMED if resumed else events.STARTED, detail=resumed)
        self._try(self._record)

    def clock(self, throughput: Throughput) -> PhaseClock:
        """Return the callback that measures how training spends its time."""
        self._clock = PhaseClock(throughput, self._nonfinite)
        return self._clock

    def note_early_stop(self, sentences: str) -> None:
        """Record that early stopping ended the training, and why."""
        events.append(self._directory.path, events.STOPPED_EARLY, self._step, sentences)

    def end(self, kind: str, detail: str = "") -> None:
        """Record the end of training, and write the report.

        Args:
            kind: `events.TRAINED`, `events.INTERRUPTED` or `events.FAILED`.
            detail: The error, if any.
        """
        if self._trainer is None or self._has_ended:
            return
        self._has_ended = True
        events.append(self._directory.path, kind, self._step, detail)
        self._try(lambda: self._write(kind), is_failed=kind == events.FAILED)

    @contextlib.contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Record an exception that leaves this context."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FloatingPointError) and self._trainer is not None:
                events.append(self._directory.path, events.NONFINITE, self._step)
            self._failed(error)
            raise
        finally:
            self._trainer = self._clock = None  # breaks a reference cycle that would keep the folder locked

    def _failed(self, error: Exception) -> None:
        has_files = self._directory.metrics.exists() or any(self._directory.checkpoints.glob("*.npz"))
        if has_files or not isinstance(error, _REPEATABLE):
            self.end(events.FAILED, f"{type(error).__name__}: {message_of(error)}")

    @property
    def _step(self) -> int | None:
        return None if self._clock is None else self._clock.step

    def _nonfinite(self, step: int | None) -> None:
        if self._trainer is not None:
            events.append(self._directory.path, events.NONFINITE, step)

    def _write(self, kind: str) -> None:
        self._record()
        if kind == events.FAILED:
            self._directory.lacks_report = self._run.callbacks.report
        elif self._run.callbacks.report:
            from tfpar.reports import report_files  # Matplotlib takes a second

            report_files.write(self._directory.path, status=kind)

    def _record(self) -> None:
        assert self._trainer is not None, "the training has begun"
        facts = run_facts.describe(self._run, self._directory, self._trainer)
        if record := self._pipeline.get("record"):
            facts["layout"]["stages"] = self._pipeline["table"]
            if len(record.planned.spans) <= timelines.MOST_SPANS:
                facts["pipeline"] = timelines.to_table(record)
        if self._clock is not None and self._clock.seconds:
            facts |= {"memory": run_facts.memory(), "seconds": self._clock.seconds, "points": self._clock.points}
        atomic_file.write(self._directory.path / RECORD, json.dumps(facts) + "\n")

    def _try(self, action: Any, is_failed: bool = False) -> None:
        """Run an optional action; print why it failed, unless the run itself has failed."""
        try:
            action()
        except Exception as error:
            if not is_failed and self._directory.path.exists():
                print(line("report", f"none: {type(error).__name__}: {excerpt(message_of(error), 160)}"), flush=True)

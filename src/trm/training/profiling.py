"""`trm train --profile`: record a few steps once auto-tuning has finished, then continue as before.

Recording takes time and changes no result. The steps are chosen so that no evaluation falls between them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self

from macbook_optimization.durable_files import make_directory
from macbook_optimization.file_errors import reason_of
from macbook_optimization.memory_readings import own_bytes, peak_bytes, return_freed_memory
from trm.backends.base import Learner, Recording, StepRecorder, StepResult
from trm.batch import Batch
from trm.config import RunConfig
from trm.runs.events import Profiled
from trm.slots import Slots
from trm.training.log import RunLog
from trm.training.profile_summary import (
    DATA,
    STEP,
    MemoryReading,
    Profile,
    allocated_bytes,
    describe,
    mean_seconds,
    operations,
)
from trm.training.state import TrainingState

PROFILE = "profile"  # directory in a run
STEPS_BEFORE = 3  # with the final plan, to compare with
MAX_STEPS = 5
MAX_SECONDS = 1.0  # of recorded steps: a second may have 100,000 operations, of 0.7 KiB each
_MAX_ATTEMPTS = 3
# The profilers of PyTorch write messages of their own into the live display; read when PyTorch is loaded.
QUIET_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}

Advanced = tuple[float, StepResult]  # what a step returns: its learning rate and its result


@dataclass
class _Attempt:
    """A recording in progress."""

    recorder: StepRecorder
    num_steps: int
    memory: list[MemoryReading]
    seconds: list[float] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


class StepProfiler:
    """Records a few steps of a run, once."""

    def __init__(self, make_recorder: Callable[[Learner], StepRecorder], log: RunLog) -> None:
        self.make_recorder = make_recorder
        self.log = log
        self.seconds_before: list[float] = []  # of each step since the plan is final
        self.attempt: _Attempt | None = None
        self.attempts = 0
        self.is_done = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what is still being recorded when training ends."""
        self._abandon()
        if not self.is_done and error is None:
            self.log.message(
                f"No steps were profiled: this takes auto-tuning, {STEPS_BEFORE} more steps, and up to "
                f"{MAX_STEPS} recorded ones."
            )

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self.attempt is None else self.attempt.recorder.phase(name)

    def step(self, state: TrainingState, advance: Callable[[], Advanced]) -> Advanced:
        """Take a step, recorded if it is one of those."""
        if self.is_done or state.plan.provisional:
            return advance()
        if self.attempt is None and self._may_start(state):
            self._start(state)
        started = time.monotonic()
        try:
            with self.phase(STEP):
                advanced = advance()
        except BaseException:  # a step that did not happen: the next one starts again
            self._abandon()
            raise
        seconds = time.monotonic() - started
        if self.attempt is None:
            self.seconds_before.append(seconds)
        else:
            self._take(self.attempt, state, seconds, advanced[1])
        return advanced

    def _may_start(self, state: TrainingState) -> bool:
        if len(self.seconds_before) < STEPS_BEFORE or self.attempts >= _MAX_ATTEMPTS:
            return False
        return steps_without_evaluation(state.config, state.step) >= self._num_steps(state)

    def _num_steps(self, state: TrainingState) -> int:
        """Return how many steps to record: fewer where they take long, or where evaluations are frequent."""
        in_time = int(MAX_SECONDS / max(median(self.seconds_before), 1e-9))
        left = state.config.training.last_step - state.step
        every = state.config.evaluation.every_steps or MAX_STEPS
        return max(1, min(MAX_STEPS, in_time, left, every))

    def _start(self, state: TrainingState) -> None:
        self.attempts += 1
        recorder = self.make_recorder(state.learner)
        memory = [_read_memory("before")]
        num_steps = self._num_steps(state)
        recorder.start()
        self.attempt = _Attempt(recorder, num_steps, memory)

    def _abandon(self) -> None:
        if self.attempt is not None:
            self.attempt.recorder.stop(None)
            self.attempt = None

    def _take(self, attempt: _Attempt, state: TrainingState, seconds: float, result: StepResult) -> None:
        attempt.seconds.append(seconds)
        attempt.results.append(result)
        attempt.memory.append(_read_memory(f"after step {state.step}"))
        if len(attempt.seconds) == attempt.num_steps:
            self.attempt = None
            self.is_done = True
            self._write(attempt, state)

    def _write(self, attempt: _Attempt, state: TrainingState) -> None:
        recording = self._stop(attempt.recorder)
        if recording is None:
            return
        profile = Profile(
            last_step=state.step,
            num_steps=attempt.num_steps,
            step_seconds=sum(attempt.seconds) / attempt.num_steps,
            step_seconds_before=median(self.seconds_before),
            threads=len({span.thread for span in recording.spans}),
            phase_seconds=mean_seconds([result.seconds for result in attempt.results]),
            operations=operations(recording.spans),
            allocated_bytes=allocated_bytes(recording),
            memory=attempt.memory,
        )
        self.log.write(f"{PROFILE}/summary.txt", describe(profile, state.plan))
        self.log.write(f"{PROFILE}/summary.json", json.dumps(profile.to_json(), indent=2))
        return_freed_memory()  # of the recording
        self.log.event(
            Profiled(state.step, profile.num_steps, profile.step_seconds, profile.step_seconds_before)
        )
        total = max(sum(profile.phase_seconds.values()), 1e-9)
        shares = ", ".join(f"{name} {spent / total:.0%}" for name, spent in profile.phase_seconds.items())
        self.log.message(
            f"Profile: {shares}. {self.log.run.path / PROFILE} has summary.txt and trace.json, which "
            "https://ui.perfetto.dev opens."
        )

    def _stop(self, recorder: StepRecorder) -> Recording | None:
        """Write the trace. What goes wrong is reported: a profile must not end training."""
        directory = self.log.run.path / PROFILE
        partial = directory / ".trace.json.partial"
        try:
            make_directory(directory)
        except OSError as error:
            recorder.stop(None)
            self._failed(error)
            return None
        try:
            recording = recorder.stop(partial)
            os.replace(partial, directory / "trace.json")
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._failed(error)
            return None
        return recording

    def _failed(self, error: OSError) -> None:
        self.log.message(f"warning: no profile can be written: {reason_of(error)}. Training continues.")


class ProfiledState(TrainingState):
    """A training state whose steps a profiler may record."""

    def __init__(self, profiler: StepProfiler, *parts: Any) -> None:
        super().__init__(*parts)
        self.profiler = profiler

    def advance(self, next_size: Callable[[int], int]) -> Advanced:
        take_step = super().advance
        return self.profiler.step(self, lambda: take_step(next_size))

    def next_batch(self, slots: Slots, step: int) -> Batch:
        with self.profiler.phase(DATA):
            return super().next_batch(slots, step)


def steps_without_evaluation(config: RunConfig, step: int) -> int:
    """Return how many steps follow this one before the next evaluation begins."""
    every = config.evaluation.every_steps
    left = config.training.last_step - step
    return left if every is None else min(left, every - step % every)


def _read_memory(when: str) -> MemoryReading:
    return MemoryReading(when, own_bytes(), peak_bytes())

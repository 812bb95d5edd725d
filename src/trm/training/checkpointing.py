"""Checkpoints of a run: when they are due, what happens when saving fails, and which one is the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from macbook_optimization.checkpoint_files import Checkpoint, Tensors
from macbook_optimization.checkpoint_management import CheckpointManager, checked_best
from macbook_optimization.errors import CheckpointError, ConfigError, NonFiniteError
from macbook_optimization.json_types import JsonObject
from trm.config import CheckpointsConfig
from trm.config.renamed import with_current_keys
from trm.runs.events import Damaged, NotSaved, SavedAgain
from trm.runs.metric import primary_metric
from trm.runs.rows import EvalRow
from trm.tasks.metrics import gain, goodness, has_reached, shown_value
from trm.training.log import RunLog
from trm.training.signals import Interrupted

TIME_SHARE = 0.005  # of the training time that saving may take
RETRY_SECONDS = 10.0  # after a save that failed; checking for free space costs nothing
REMINDER_SECONDS = 60.0


class Checkpointer:
    """Saves the state when it is due. Times are monotonic: a changed date or a night of sleep causes at most
    one save."""

    def __init__(self, settings: CheckpointsConfig, manager: CheckpointManager, log: RunLog) -> None:
        self.settings = settings
        self.manager = manager
        self.log = log
        self.saved_step: int | None = None  # the newest that is safe
        self.saved_at = time.monotonic()
        self.save_seconds = 0.0  # of the last save
        self.failed_at: float | None = None
        self.problem = ""  # of the last save that failed
        self.retry_seconds = RETRY_SECONDS
        self.unmarked_best: JsonObject | None = None  # could not be written yet

    @property
    def every_seconds(self) -> float:
        return max(self.settings.every_seconds, self.save_seconds / TIME_SHARE)

    def is_due(self, step: int) -> bool:
        return self.is_due_by_time() or (self.failed_at is None and self.is_due_by_step(step))

    def is_due_by_step(self, step: int) -> bool:
        every = self.settings.every_steps
        return every is not None and step > 0 and step % every == 0

    def is_due_by_time(self) -> bool:
        now = time.monotonic()
        if self.failed_at is not None:
            return now - self.failed_at >= self.retry_seconds
        return now - self.saved_at >= self.every_seconds

    def recover(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, and report damaged ones, which are set aside."""
        checkpoint, damaged = self.manager.recover()
        for problem in damaged:
            self.log.event(Damaged(problem))
            self.log.message(f"A checkpoint is damaged: {problem}.")
        return checkpoint

    def save(self, step: int, tensors: Tensors, metadata: JsonObject) -> bool:
        """Return whether the state is safe. `NonFiniteError` is not about saving, and is raised."""
        if self.unmarked_best is not None:  # before a rotation that does not know it
            self.mark_best(self.unmarked_best)
        started = time.monotonic()
        if self.saved_step != step:
            try:
                with self.log.timed("saving"):
                    self.manager.save(step, tensors, metadata)
            except CheckpointError as error:
                self._failed(step, error, time.monotonic() - started)
                return False
            self.save_seconds = time.monotonic() - started
            self.saved_step = step
        if self.failed_at is not None:
            self.log.event(SavedAgain(step))
            self.log.message(f"Step {step} is saved.")
        self.saved_at = time.monotonic()
        self.failed_at = None
        return True

    def _failed(self, step: int, error: CheckpointError, took_seconds: float) -> None:
        if self.failed_at is None:
            self.log.event(NotSaved(step, str(error)))
            self.log.message(
                f"warning: step {step} is not saved: {error}. Training continues and saves when it can; "
                f"{self.what_is_safe}."
            )
        self.failed_at = time.monotonic()
        self.problem = str(error)
        self.retry_seconds = max(RETRY_SECONDS, took_seconds / TIME_SHARE)

    @property
    def what_is_safe(self) -> str:
        return "nothing is saved yet" if self.saved_step is None else f"step {self.saved_step} is safe"

    def warn_if_full(self, tensors: Tensors) -> None:
        try:
            self.manager.check_space(tensors)
        except CheckpointError as error:
            self.log.message(f"warning: {error}. Nothing can be saved until there is room.")

    def mark_best(self, best: JsonObject) -> None:
        try:
            self.manager.mark_best(best)
            self.unmarked_best = None
        except CheckpointError as error:
            if self.unmarked_best is None:
                self.log.message(f"warning: {error}")
            self.unmarked_best = best

    def save_or_wait(
        self, save: Callable[[], bool], check: Callable[[], None], *, stopping: bool = False
    ) -> None:
        """Save at the end, when the work of hours is only in memory.

        Waits for room until `check` raises `Interrupted`. If a stop is already the reason, repeating it exits
        immediately.
        """
        again = "Ctrl-C again" if stopping else "Ctrl-C"
        reminded_at = None
        while not save():
            if reminded_at is None or time.monotonic() - reminded_at >= REMINDER_SECONDS:
                reminded_at = time.monotonic()
                what_now = f"Saving is retried until it works; {again} gives up, and {self.what_is_safe}."
                self.log.message(f"{self.problem}. {what_now}")
            try:
                _wait(check)
            except Interrupted:
                raise CheckpointError(
                    f"What came after the newest checkpoint is lost: {self.what_is_safe}",
                    hint="Free some disk space; the same command resumes from there.",
                ) from None

    def save_interrupted(self, save: Callable[[], bool], check: Callable[[], None]) -> None:
        """Save after a request to stop. NaN and Inf are not saved: the earlier checkpoints stay.

        `check` raises `Interrupted` if nobody waits any more.
        """
        try:
            self.save_or_wait(save, check, stopping=True)
        except NonFiniteError as error:
            self.log.message(f"{error} {self.what_is_safe.capitalize()}.")


def _wait(check: Callable[[], None]) -> None:
    for _ in range(int(RETRY_SECONDS * 5)):
        check()
        time.sleep(0.2)


class BestSoFar:
    """The best evaluation among those with the same settings and test split whose weights are safe."""

    def __init__(
        self, checkpointer: Checkpointer, settings: JsonObject, target: float | None, metric: str
    ) -> None:
        self.checkpointer = checkpointer
        self.settings = settings  # of the evaluation: others are not comparable
        self.target = target
        self.metric = metric
        self.row: JsonObject | None = None

    @property
    def reached_target(self) -> bool:
        return has_reached(self.metric, self.row[self.metric] if self.row else None, self.target)

    def restore(self, saved: JsonObject | None) -> None:
        """Take the best of a checkpoint or, if later ones were lost, of the file beside them."""
        manager = self.checkpointer.manager
        problem = manager.best_problem()
        marked = manager.best() if problem is None else None
        found = {
            best["checkpoint"]: best
            for best in (marked, checked_best(saved))
            if best and _evaluation_settings(best) == self.settings and self._has_metric(best)
        }
        present = [best for name, best in found.items() if best == marked or manager.is_intact(name)]
        self.row = max(present, key=lambda best: goodness(self.metric, best[self.metric]), default=None)
        if problem is not None:
            instead = "none is known" if self.row is None else f"{self.row['checkpoint']} is the best now"
            self.checkpointer.log.message(f"warning: {problem}; {instead}.")
        if self.row is not None and self.row != marked:  # the process was killed before it could mark it
            self.checkpointer.mark_best(self.row)

    def _has_metric(self, best: JsonObject) -> bool:
        value = best.get(self.metric)
        return isinstance(value, int | float) and not isinstance(value, bool)

    def value_of(self, evaluation: EvalRow) -> float:
        """Return the primary metric of an evaluation."""
        if self.metric not in evaluation.metrics:
            found = ", ".join(evaluation.metrics)
            raise ConfigError(f"The task's primary metric {self.metric} is not among its metrics: {found}")
        return evaluation.metrics[self.metric]

    def offer(self, evaluation: EvalRow, save: Callable[[], bool]) -> None:
        """Keep an evaluation if it is the best and its weights could be saved.

        If they could not, it still counts when it reaches the target: the run ends, and saves at last.
        """
        before = self.row
        value = self.value_of(evaluation)
        if before is not None and gain(self.metric, value, before[self.metric]) <= 0:
            return
        self.row = {
            "checkpoint": self.checkpointer.manager.path(evaluation.step).name,
            "primary_metric": self.metric,
            **evaluation.to_json(),
            "evaluated_with": self.settings,
        }
        try:
            saved = save()
        except NonFiniteError:
            self.row = before
            raise
        if saved:
            self.checkpointer.mark_best(self.row)
        elif not self.reached_target:
            self.row = before

    def mark_at_end(self, step: int) -> None:
        """Mark it again if the disk was full when it was found."""
        if self.row is not None and self.row["step"] == step:
            self.checkpointer.mark_best(self.row)

    def described(self) -> str:
        """Return the best value of the primary metric so far, for a progress line."""
        metric = None if self.row is None else primary_metric(self.row)
        return "" if metric is None else f"best {shown_value(*metric)}"


def _evaluation_settings(best: JsonObject) -> Any:
    """Return the settings that a best row was evaluated with; earlier versions used other names."""
    if "evaluated_with" in best:
        return best["evaluated_with"]
    earlier = best.get("judged_by")
    if not isinstance(earlier, dict):
        return None
    current = with_current_keys({"evaluation": earlier})
    return {**_section(current, "evaluation"), **_section(current, "inference")}


def _section(tree: dict[str, object], name: str) -> dict[str, object]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}

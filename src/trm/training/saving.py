"""When a checkpoint is due, what becomes of a save that fails, and which one is the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from macbook_optimization.checkpoint_files import Tensors
from macbook_optimization.checkpoint_management import CheckpointManager, checked_best
from macbook_optimization.children import parent_is_gone
from macbook_optimization.errors import CheckpointError, NonFiniteError
from trm.config import CheckpointsConfig
from trm.training.interruption import Interrupted
from trm.training.watching import Display, Journal

SHARE = 0.005  # of the time may go into saving
RETRY_SECONDS = 10.0  # after a save that failed; looking for free space costs nothing
REMINDER_SECONDS = 60.0


class Saver:
    """Times are of the monotonic clock, so a changed date or a night of sleep causes one save at most."""

    def __init__(
        self, settings: CheckpointsConfig, checkpoints: CheckpointManager, journal: Journal, display: Display
    ) -> None:
        self.settings, self.checkpoints = settings, checkpoints
        self.journal, self.display = journal, display
        self.step: int | None = None  # the newest that is safe
        self.at = time.monotonic()
        self.save_seconds = 0.0  # what the last one took
        self.failed_at: float | None = None
        self.problem = ""  # of the last one that failed
        self.retry_seconds = RETRY_SECONDS
        self.unmarked: dict[str, Any] | None = None  # a best that could not be written down

    @property
    def every_seconds(self) -> float:
        return max(self.settings.every_seconds, self.save_seconds / SHARE)

    def is_due(self, step: int) -> bool:
        now = time.monotonic()
        if self.failed_at is not None:
            return now - self.failed_at >= self.retry_seconds
        by_step = self.settings.every_steps is not None and step > 0 and step % self.settings.every_steps == 0
        return by_step or now - self.at >= self.every_seconds

    def save(self, step: int, tensors: Tensors, metadata: dict[str, Any]) -> bool:
        """Whether it is safe. `NonFiniteError` is not about saving, and comes through."""
        if self.unmarked is not None:  # before a rotation that does not know it
            self.mark_best(self.unmarked)
        started = time.monotonic()
        if self.step != step:
            try:
                self.checkpoints.save(step, tensors, metadata)
            except CheckpointError as error:
                self._failed(step, error, time.monotonic() - started)
                return False
            self.save_seconds = time.monotonic() - started
            self.step = step
        if self.failed_at is not None:
            self.journal.event("saved again", step=step)
            self.display.message(f"Step {step} is saved.")
        self.at, self.failed_at = time.monotonic(), None
        return True

    def _failed(self, step: int, error: CheckpointError, took_seconds: float) -> None:
        if self.failed_at is None:
            self.journal.event("not saved", step=step, cause=str(error))
            self.display.message(
                f"warning: step {step} is not saved: {error}. Training goes on and saves when it can; "
                f"{self.what_is_safe}."
            )
        self.failed_at, self.problem = time.monotonic(), str(error)
        self.retry_seconds = max(RETRY_SECONDS, took_seconds / SHARE)

    @property
    def what_is_safe(self) -> str:
        return "nothing is saved yet" if self.step is None else f"step {self.step} is safe"

    def warn_if_full(self, tensors: Tensors) -> None:
        try:
            self.checkpoints.check_space(tensors)
        except CheckpointError as error:
            self.display.message(f"warning: {error}. Nothing can be saved until there is room.")

    def mark_best(self, best: dict[str, Any]) -> None:
        try:
            self.checkpoints.mark_best(best)
            self.unmarked = None
        except CheckpointError as error:
            if self.unmarked is None:
                self.display.message(f"warning: {error}")
            self.unmarked = best

    def insist(self, save: Callable[[], bool], check: Callable[[], None], *, stopping: bool = False) -> None:
        """At the end, the work of hours is only in memory: waits for room until somebody says stop, or says
        it again if that is why it ends (which then leaves at once)."""
        again = "Ctrl-C again" if stopping else "Ctrl-C"
        told_at = None
        while not save():
            if told_at is None or time.monotonic() - told_at >= REMINDER_SECONDS:
                told_at = time.monotonic()
                what_now = f"It is tried again until it works; {again} gives up, and {self.what_is_safe}."
                self.display.message(f"{self.problem}. {what_now}")
            try:
                for _ in range(int(RETRY_SECONDS * 5)):
                    if not stopping:
                        check()
                    elif parent_is_gone():
                        raise Interrupted
                    time.sleep(0.2)
            except Interrupted:
                raise CheckpointError(
                    f"What came after the newest checkpoint is lost: {self.what_is_safe}",
                    hint="Free some disk space; the same command goes on from there.",
                ) from None


class BestSoFar:
    """The evaluation that answered best, of one very test, and whose weights are safe."""

    def __init__(self, saver: Saver, judged_by: dict[str, Any], target: float | None, headline: str) -> None:
        self.saver, self.judged_by, self.target, self.headline = saver, judged_by, target, headline
        self.row: dict[str, Any] | None = None

    @property
    def reached_target(self) -> bool:
        return self.target is not None and self.row is not None and self.row[self.headline] >= self.target

    def restore(self, saved: dict[str, Any] | None) -> None:
        """That of a checkpoint or, if later ones were lost, of the file."""
        checkpoints = self.saver.checkpoints
        marked = checkpoints.best()
        found = {
            best["checkpoint"]: best
            for best in (marked, checked_best(saved))
            if best and best.get("judged_by") == self.judged_by and self.headline in best
        }
        there = [best for name, best in found.items() if checkpoints.is_good(name)]
        self.row = max(there, key=lambda best: float(best[self.headline]), default=None)
        if self.row is not None and self.row != marked:  # it was killed before it could mark it
            self.saver.mark_best(self.row)

    def offer(self, evaluation: dict[str, Any], save: Callable[[], bool]) -> None:
        """One that could not be saved is none, unless the run ends here and saves at last."""
        before = self.row
        if before is not None and evaluation[self.headline] <= before[self.headline]:
            return
        name = self.saver.checkpoints.path(evaluation["step"]).name
        self.row = {"checkpoint": name, "headline": self.headline, **evaluation, "judged_by": self.judged_by}
        try:
            saved = save()
        except NonFiniteError:
            self.row = before
            raise
        if saved:
            self.saver.mark_best(self.row)
        elif not self.reached_target:
            self.row = before

    def mark_at_last(self, step: int) -> None:
        """Again, if the disk was full when it was found."""
        if self.row is not None and self.row["step"] == step:
            self.saver.mark_best(self.row)

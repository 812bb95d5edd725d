"""A run that is watched from another process: it may begin, die, be resumed or be replaced meanwhile."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from macbook_optimization.errors import ConfigError, RunError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.progress_lines import fit_texts
from macbook_optimization.terminal_text import one_line
from trm.reports.monitor import view_of
from trm.reports.view import RunView
from trm.runs.directory import Run

Identity = tuple[int, int, int]  # device, inode and time of a recipe


@dataclass
class Watched:
    """A view that follows its run directory. Nothing here writes to it.

    A display formats it in its own thread, so it is not brought up to date at the same time.
    """

    run: Run
    view: RunView
    recipe: Identity | None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path) -> Watched:
        run = Run(path)
        recipe = _identity(run)
        watched = cls(run, view_of(run, run.config), recipe)
        watched.update()
        return watched

    def update(self) -> None:
        """Take in what is new; start again with another recipe. What cannot be read is left as it is."""
        with self._lock:
            self._update()

    def _update(self) -> None:
        recipe = _identity(self.run)
        if recipe is not None and recipe != self.recipe:
            try:
                self.view = view_of(self.run, self.run.config)
                self.recipe = recipe
            except (RunError, ConfigError, OSError):
                return
        try:
            self.view.read()
        except OSError:
            return

    def lines(self, columns: int, *, ascii_only: bool) -> list[str]:
        with self._lock:
            title = f"{one_line(str(self.run.path))}: {self.view.described_state()}"
            return [*fit_texts([title], columns), *self.view.lines(columns, ascii_only=ascii_only)]

    def summary(self) -> str:
        with self._lock:
            return self.view.summary()

    def facts(self) -> JsonObject:
        return {"run": str(self.run.path), **self.view.facts()}


def _identity(run: Run) -> Identity | None:
    try:
        status = os.stat(run.path / "recipe.yaml")
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns

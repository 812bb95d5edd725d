"""The known tasks, in one table, and how a dataset of any task is built."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import cast

from macbook_optimization.errors import ConfigError
from macbook_optimization.json_types import JsonObject
from trm.config import did_you_mean
from trm.display import Display, building
from trm.tasks.base import Options, ShowsBuild, Task

_MODULES = {  # imported on demand
    "sudoku": "trm.tasks.grids.sudoku",
    "maze": "trm.tasks.grids.maze",
    "arc": "trm.tasks.grids.arc",
    "email": "trm.tasks.documents.email",
    "email-masked": "trm.tasks.documents.masked",
    "text": "trm.tasks.documents.text",
}
TASK_NAMES = tuple(_MODULES)
REFERENCE_TASK = "sudoku"  # of datasets that do not name theirs, as those of the reference implementation


def load_task(name: str) -> Task:
    """Return a task by name, or the `TASK` of a Python file. Such a file is executed: it is code."""
    if name.endswith(".py"):
        return _task_of_file(Path(name))
    if name not in _MODULES:
        raise ConfigError(
            f"There is no task {name!r}{did_you_mean(name, TASK_NAMES)}",
            hint=f"Use {', '.join(TASK_NAMES)}, or a Python file that defines one.",
        )
    return cast(Task, importlib.import_module(_MODULES[name]).TASK)


def _task_of_file(path: Path) -> Task:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"There is no task file {path}",
            hint="Run this where the recipe was trained, or give a full path.",
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: Task | None = getattr(module, "TASK", None)
    if task is None:
        raise ConfigError(f"{path} defines no TASK", hint="docs/tasks.md shows what such a file looks like.")
    return task


def build_dataset(task: Task, options: Options, directory: Path, display: Display, jobs: int) -> JsonObject:
    """Build a dataset, and return what its task reports about it."""
    if isinstance(task, ShowsBuild):
        return task.build_shown(options, directory, display, jobs)
    task.build(options, directory, building(display), jobs)
    return {}

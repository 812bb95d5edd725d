"""What is learned: files become token arrays, and answers become something a person reads."""

import importlib.util
from pathlib import Path

from macbook_optimization.errors import ConfigError
from trm.tasks.base import Task


def load_task(name: str) -> Task:
    """One of ours, or the `TASK` of a Python file that a recipe names. Such a file is run: it is code."""
    if name.endswith(".py"):
        return _task_of_file(Path(name))
    from trm.tasks import arc, maze, sudoku

    tasks: tuple[Task, ...] = sudoku.TASK, maze.TASK, arc.TASK
    return next(task for task in tasks if task.name == name)


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

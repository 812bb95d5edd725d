"""A run directory: recipe, plan, metrics, events and checkpoints of one training.

Everything else about a run follows from these files, so a run that was killed, copied or renamed is still
a run. Metrics and events are appended line by line; a torn last line is ignored when they are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from macbook_optimization.checkpoint_management import CheckpointManager
from macbook_optimization.errors import ConfigError, RunError
from trm.config import RunConfig, config_from_text, differences


@dataclass(frozen=True, slots=True)
class Run:
    path: Path

    @property
    def config(self) -> RunConfig:
        recipe = self.path / "recipe.yaml"
        try:
            return config_from_text(recipe.read_text(encoding="utf-8"), str(recipe))
        except OSError as error:
            raise RunError(
                f"{self.path} is not a run: {recipe.name} cannot be read ({error.strerror})",
                hint="`trm runs` lists the runs there are.",
            ) from error

    def checkpoints(self, keep: int = 3) -> CheckpointManager:
        return CheckpointManager(self.path, keep)

    def write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path / name)
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}") from error

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"Cannot write {self.path / name}: {error.strerror}") from error

    def event(self, what: str, **facts: Any) -> None:
        self.append("events.jsonl", {"time": time.time(), "event": what, **facts})

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [row for line in lines if (row := _parse_line(line)) is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def open_run(path: Path, config: RunConfig) -> Run:
    """A new run, or the one that lies there if it learns the same."""
    run = Run(path)
    if (path / "recipe.yaml").exists():
        different = differences(config.what_is_learned(), run.config.what_is_learned())
        if different:
            raise RunError(
                f"{path} holds a run of another recipe:\n  " + "\n  ".join(different),
                hint="Use another --run directory, or --fresh to set that run aside and start anew.",
            )
    elif path.is_dir() and any(path.iterdir()):
        raise RunError(f"{path} is not empty and not a run", hint="Use another --run directory.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"Cannot create the run directory {path}: {error.strerror}") from error
    run.write("recipe.yaml", config.to_yaml())
    return run


def set_aside(path: Path) -> Path | None:
    """Gives way to a fresh run, without losing the old one."""
    if not path.exists():
        return None
    number = next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.{n}").exists())
    try:
        return path.rename(path.with_name(f"{path.name}.{number}"))
    except OSError as error:
        raise RunError(f"Cannot set {path} aside: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RunSummary:
    path: str
    task: str
    step: int
    max_steps: int
    seconds: float | None
    exact_accuracy: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(root: Path) -> list[RunSummary]:
    return [
        summarise(Run(path.parent)) for path in sorted(root.glob("*/recipe.yaml")) if _readable(path.parent)
    ]


def _readable(path: Path) -> bool:
    try:
        Run(path).config  # noqa: B018
    except (RunError, ConfigError):
        return False
    return True


def summarise(run: Run) -> RunSummary:
    config = run.config
    rows = run.rows()
    best = run.checkpoints().best()
    return RunSummary(
        path=str(run.path),
        task=config.task,
        step=max((row["step"] for row in rows if "step" in row), default=0),
        max_steps=config.training.max_steps,
        seconds=rows[-1].get("seconds") if rows else None,
        exact_accuracy=best["exact_accuracy"] if best else None,
    )

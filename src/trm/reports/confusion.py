"""The categories that a classifier confuses, from the table that its evaluations record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.input_files import read_json
from macbook_optimization.units import MIB
from trm.reports.history import History
from trm.runs.directory import DATASET, MAIL
from trm.runs.rows import Row, number

MAX_CATEGORIES = 60  # of a table that is shown in full
_MAX_BYTES = 64 * MIB
_NUM_CONFUSED = 10


@dataclass(frozen=True, slots=True)
class Confused:
    category: str
    taken_for: str
    count: int
    share: float  # of the category


@dataclass(frozen=True, slots=True)
class Confusion:
    step: int
    categories: list[str]
    counts: list[list[int]]  # a row per category, a column per answer
    worst: list[Confused]

    @property
    def is_small(self) -> bool:
        return len(self.categories) <= MAX_CATEGORIES


def confusion_of(run: Path, dataset: Path | None, history: History, step: int | None) -> Confusion | None:
    """Return the table of the evaluation at this step, or of the last one that has a table."""
    rows = [row for row in history.evaluations if _table(row) is not None]
    if not rows:
        return None
    row = next((row for row in rows if row.get("step") == step), rows[-1])
    counts = _table(row)
    assert counts is not None
    names = _category_names(run, dataset, len(counts))
    return Confusion(int(row["step"]), names, counts, _worst(names, counts))


def _table(row: Row) -> list[list[int]] | None:
    """Return the counts of a row, or None if they are not a square table of numbers."""
    tables = row.get("tables")
    table = tables.get("confusion") if isinstance(tables, dict) else None
    if not isinstance(table, list) or not table:
        return None
    if not all(isinstance(line, list) and len(line) == len(table) for line in table):
        return None
    numbers = [[number(value) for value in line] for line in table]
    if not all(math.isfinite(value) and value >= 0 for line in numbers for value in line):
        return None
    return [[int(value) for value in line] for line in numbers]


def _category_names(run: Path, dataset: Path | None, count: int) -> list[str]:
    """Return the names in the first file that has as many of them, or numbers."""
    datasets = [path for path in (run / DATASET, dataset) if path is not None]
    places = [(run / MAIL / "mail.json", "categories")]
    places += [(path / "train" / "dataset.json", "class_names") for path in datasets]
    for path, key in places:
        names = _names_in(path, key)
        if len(names) == count:
            return names
    return [f"category {place}" for place in range(count)]


def _names_in(path: Path, key: str) -> list[str]:
    try:
        found = read_json(path, _MAX_BYTES)
    except (OSError, ValueError):
        return []
    names = found.get(key) if isinstance(found, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _worst(names: Sequence[str], counts: Sequence[Sequence[int]]) -> list[Confused]:
    """Return the pairs that were confused most often."""
    pairs: Iterable[tuple[int, int]] = (
        (label, answer) for label in range(len(names)) for answer in range(len(names)) if label != answer
    )
    found = [
        Confused(
            names[label], names[answer], counts[label][answer], counts[label][answer] / sum(counts[label])
        )
        for label, answer in pairs
        if counts[label][answer]
    ]
    return sorted(found, key=lambda each: -each.count)[:_NUM_CONFUSED]

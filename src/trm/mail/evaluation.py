"""The quality of one or several models' answers, on messages whose categories are known.

Every path of a model, both together and the baseline are columns of the tables. A column has a row of numbers
per message. Probabilities can be checked for calibration; mere scores only say which category wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from macbook_optimization.errors import DataError
from macbook_optimization.json_types import JsonObject
from trm.arrays import BoolArray, FloatArray, IntArray
from trm.mail.calibration import expected_calibration_error
from trm.mail.deciding import Compared
from trm.mail.model import BASELINE, MailModel
from trm.mail.reading import Read
from trm.tasks.documents.labels import CategoryMap, LabelCounts, category_of, default_map
from trm.tasks.metrics import category_scores, confusion_matrix, macro_f1

NUM_BINS = 15  # of confidence


@dataclass(frozen=True, slots=True)
class Column:
    """The answers of one model: a row per message, a number per category."""

    scores: FloatArray  # (n, num_categories)
    are_probabilities: bool = True
    decided: BoolArray | None = None  # which answers are not unsure; None if the model does not say


@dataclass(frozen=True, slots=True)
class CategoryResult:
    name: str
    number: int  # of messages
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of similar confidence."""

    number: int
    confidence: float  # their mean
    accuracy: float


@dataclass(frozen=True, slots=True)
class ColumnResult:
    name: str
    accuracy: float
    macro_f1: float
    categories: list[CategoryResult]
    confusion: list[list[int]]  # category of the message, answer
    decided: float | None  # share of the messages
    error_of_decided: float | None
    calibration_error: float | None
    reliability: list[Bin]  # bins that have answers, by rising confidence; none for mere scores


@dataclass(frozen=True, slots=True)
class Evaluation:
    messages: int
    categories: list[str]
    columns: list[ColumnResult]

    @property
    def main(self) -> ColumnResult:
        """The column that decides, if there is one that says so."""
        return next((each for each in self.columns if each.decided is not None), self.columns[0])

    def to_json(self) -> JsonObject:
        return asdict(self)


def evaluate(columns: Mapping[str, Column], labels: IntArray, categories: Sequence[str]) -> Evaluation:
    """Compare the answers of each column with the categories of the messages."""
    results = [_result(name, column, labels, categories) for name, column in columns.items()]
    return Evaluation(len(labels), list(categories), results)


def _result(name: str, column: Column, labels: IntArray, categories: Sequence[str]) -> ColumnResult:
    predicted = column.scores.argmax(1)
    confusion = confusion_matrix(labels, predicted, len(categories))
    decided = column.decided
    error = None
    if decided is not None and decided.any():
        error = float((predicted != labels)[decided].mean())
    has_probabilities = column.are_probabilities
    return ColumnResult(
        name=name,
        accuracy=float(np.trace(confusion) / max(1, len(labels))),
        macro_f1=macro_f1(confusion),
        categories=[
            CategoryResult(category, int(number), float(precision), float(recall), float(f1))
            for category, (precision, recall, f1, number) in zip(
                categories, category_scores(confusion), strict=True
            )
        ],
        confusion=confusion.tolist(),
        decided=None if decided is None else float(decided.mean()),
        error_of_decided=error,
        calibration_error=(
            expected_calibration_error(column.scores, labels, NUM_BINS) if has_probabilities else None
        ),
        reliability=reliability(column.scores, labels) if has_probabilities else [],
    )


def reliability(probabilities: FloatArray, labels: IntArray, num_bins: int = NUM_BINS) -> list[Bin]:
    """Group answers by confidence. The distances of the groups, weighted, are the calibration error."""
    confidence = probabilities.max(1)
    right = probabilities.argmax(1) == labels
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    return [
        Bin(int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean()))
        for inside in (bins == each for each in range(num_bins))
        if inside.any()
    ]


@dataclass(slots=True)
class Labelled:
    """Messages that were decided, with what says their category. Their text is not kept."""

    folders: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    columns: list[dict[str, FloatArray]] = field(default_factory=list)
    decided: list[bool] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reasons


@dataclass(frozen=True, slots=True)
class Comparable:
    """The messages whose category the model has, and how many others there were."""

    columns: dict[str, Column]
    labels: IntArray
    skipped: dict[str, int]  # reasons
    without_category: int
    unknown_categories: dict[str, int]  # that the model does not have

    def counts(self) -> JsonObject:
        return {
            "skipped": self.skipped,
            "without_category": self.without_category,
            "unknown_categories": self.unknown_categories,
        }


def collect(compared: Iterable[tuple[Read, Compared | None]]) -> Labelled:
    found = Labelled()
    for read, said in compared:
        if said is None:
            found.skipped[read.features.mail.reason] += 1
            continue
        found.folders.append(read.message.labels)
        found.labels.append(read.features.mail.labels)
        found.columns.append(said.columns)
        found.decided.append(said.is_decided)
    return found


def comparable(found: Labelled, model: MailModel, mapping: CategoryMap | None) -> Comparable:
    """Give every message its category, as training does; leave out what cannot be compared."""
    categories = model.categories
    counts = LabelCounts()
    for folders, labels in zip(found.folders, found.labels, strict=True):
        counts.add(folders, labels)
    used = mapping or default_map(counts)
    places = {name: place for place, name in enumerate(categories)}
    names = [category_of(*pair, used) for pair in zip(found.folders, found.labels, strict=True)]
    rows = [row for row, name in enumerate(names) if name in places]
    unknown = Counter(name for name in names if name is not None and name not in places)
    if not rows:
        raise DataError(
            "No message has a category of this model",
            hint=f"Its categories are {', '.join(categories)}. Use a mapping (--mapping FILE).",
        )
    decided = np.array([found.decided[row] for row in rows])
    columns = {
        name: Column(
            np.array([found.columns[row][name] for row in rows]),
            are_probabilities=name != BASELINE,
            decided=decided if name == model.main_column else None,
        )
        for name in found.columns[rows[0]]
    }
    return Comparable(
        columns=columns,
        labels=np.array([places[str(names[row])] for row in rows], dtype=np.int64),
        skipped=dict(sorted(found.skipped.items())),
        without_category=sum(name is None for name in names),
        unknown_categories=dict(sorted(unknown.items())),
    )

"""Learning from corrections without training again.

A correction is a message and the category that its owner gave it. The table is changed by little more than
what it takes to answer every corrected message right with a margin; messages that share no words with them
keep their scores. The table that training fitted is kept as it was, so a correction can be taken back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.input_files import read_input
from macbook_optimization.units import MIB
from trm.arrays import Float32Array, FloatArray, IntArray
from trm.mail.model import MailModel
from trm.mail.reading import Features

FILE_NAME = "corrections.json"
MARGIN_IN_TEMPERATURES = 4.0  # a corrected message is then answered with a confidence of about 98 %
_MAX_PASSES = 100
_MAX_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """No text is kept: only which columns of the vocabulary the message has."""

    key: str  # hash of the message, so that it is found again
    category: int
    columns: IntArray
    weights: Float32Array
    scores: Float32Array  # of the linear path without corrections
    added: Float32Array  # by the recursive path, in the same units


def key_of(raw: bytes) -> str:
    """Return the same key for a message in an mbox, in a Maildir and in a file of its own."""
    if raw.startswith(b"From "):  # the separator of an mbox
        raw = raw.partition(b"\n")[2]
    text = re.sub(rb"^>+(?=From )", b"", raw.replace(b"\r\n", b"\n"), flags=re.MULTILINE)
    return hashlib.sha256(text.rstrip(b"\n")).hexdigest()


def earlier_key_of(raw: bytes) -> str:
    """Return the key of corrections that earlier versions stored."""
    return hashlib.sha256(raw).hexdigest()


@dataclass(frozen=True, slots=True)
class CorrectionSummary:
    """A correction for its owner: the message is known by its hash alone."""

    key: str
    category: str
    before: str  # what the linear path says without corrections
    ngrams: int  # of the message, in the vocabulary


def summarise(model: MailModel, corrections: Sequence[Correction]) -> list[CorrectionSummary]:
    return [
        CorrectionSummary(
            key=each.key,
            category=model.categories[each.category],
            before=model.categories[int(each.scores.argmax())],
            ngrams=len(each.columns),
        )
        for each in corrections
    ]


def check_category(model: MailModel, category: str) -> None:
    if category not in model.categories:
        raise DataError(
            f"{category!r} is not a category of this model",
            hint=f"Its categories are {', '.join(model.categories)}. A new one needs training.",
        )


def correction_of(model: MailModel, features: Features, key: str, category: str) -> Correction:
    """Return a correction of one message; `model` is the one without corrections."""
    bags = model.bags([features.counts])
    scores = model.table.scores(bags)[0]
    added = np.zeros_like(scores)
    if model.num_tokens:
        added = model.recursive_scores([features.mail])[0].astype(np.float32)
    return Correction(key, model.categories.index(category), bags.indices, bags.weights, scores, added)


def apply_corrections(model: MailModel, corrections: Sequence[Correction]) -> MailModel:
    if not corrections:
        return model
    margin = MARGIN_IN_TEMPERATURES * model.temperature
    columns, change = fit_corrections(corrections, len(model.categories), margin)
    return model.corrected(columns, change)


def fit_corrections(
    corrections: Sequence[Correction], num_categories: int, margin: float
) -> tuple[IntArray, Float32Array]:
    """Return the columns that change, and by how much for each category.

    Passive-aggressive updates, each the smallest that gives one message its margin, are repeated until none
    violates it. Messages that contradict each other never agree, so the number of passes is limited. The
    margin holds with and without what the recursive path adds, since it is skipped where the linear path is
    certain.
    """
    columns = np.unique(np.concatenate([correction.columns for correction in corrections]))
    change = np.zeros((len(columns), num_categories))
    places = [np.searchsorted(columns, correction.columns) for correction in corrections]
    for _ in range(_MAX_PASSES):
        num_updates = 0
        for correction, rows in zip(corrections, places, strict=True):
            for added in (0.0, correction.added) if correction.added.any() else (0.0,):
                num_updates += _update(change, rows, correction, correction.scores + added, margin)
        if not num_updates:
            break
    return columns, change.astype(np.float32)


def _update(
    change: FloatArray, rows: IntArray, correction: Correction, scores: Float32Array, margin: float
) -> bool:
    """Change the rows of one message if its margin is too small; return whether that was so."""
    squared = float((correction.weights.astype(np.float64) ** 2).sum())
    current = scores + correction.weights @ change[rows]
    rival = _best_other(current, correction.category)
    lack = margin - (current[correction.category] - current[rival])
    if squared == 0.0 or lack <= 1e-6:
        return False
    step = lack / (2 * squared) * correction.weights
    change[rows, correction.category] += step
    change[rows, rival] -= step
    return True


def _best_other(scores: np.ndarray, category: int) -> int:
    others = scores.copy()
    others[category] = -np.inf
    return int(others.argmax())


def load_corrections(directory: Path, num_columns: int) -> list[Correction]:
    """Read the corrections of a model; a message that was corrected several times has the last category."""
    path = directory / FILE_NAME
    try:
        rows = json.loads(read_input(path, _MAX_BYTES))
        found = [
            Correction(
                key=row["key"],
                category=int(row["category"]),
                columns=np.array(row["columns"], dtype=np.int64),
                weights=np.array(row["weights"], dtype=np.float32),
                scores=np.array(row["scores"], dtype=np.float32),
                added=np.array(row["added"], dtype=np.float32),
            )
            for row in rows
        ]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}", hint="Remove it to forget all corrections.") from error
    if any((each.columns >= num_columns).any() for each in found):
        raise DataError(f"{path} belongs to another model", hint="Remove it to forget all corrections.")
    return found


def save_corrections(directory: Path, corrections: Sequence[Correction]) -> None:
    rows = [
        {
            "key": each.key,
            "category": each.category,
            "columns": each.columns.tolist(),
            "weights": [round(float(value), 6) for value in each.weights],
            "scores": [round(float(value), 6) for value in each.scores],
            "added": [round(float(value), 6) for value in each.added],
        }
        for each in corrections
    ]
    replace_file(directory / FILE_NAME, json.dumps(rows).encode())


@contextmanager
def changing(directory: Path, num_columns: int) -> Iterator[list[Correction]]:
    """Yield the corrections on disk to be changed, and save them. Other processes wait meanwhile."""
    with open(directory / f".{FILE_NAME}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        current = load_corrections(directory, num_columns)
        before = list(current)
        yield current
        if current != before:
            save_corrections(directory, current)


def with_corrections(corrections: Sequence[Correction], new: Sequence[Correction]) -> list[Correction]:
    """Return the corrections with others, which replace earlier ones of the same messages."""
    by_key = {each.key: each for each in (*corrections, *new)}
    return list(by_key.values())

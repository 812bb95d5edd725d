"""Files of grid puzzles: CSV with a header, CSV without one, or one puzzle a line; plain, gzip or xz."""

from __future__ import annotations

import csv
import gzip
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from macbook_optimization.errors import DataError

_QUESTION_NAMES = ("question", "puzzle", "quizzes", "quiz", "q")
_ANSWER_NAMES = ("answer", "solution", "solutions", "a")


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # counted from 1, for messages
    question: str
    answer: str | None
    source: str | None


def read_rows(path: Path) -> list[Row]:
    try:
        with _open_text(path) as file:
            reader = csv.reader(file)
            cells = [(reader.line_num, row) for row in reader if any(row)]
    except FileNotFoundError as error:
        raise DataError(f"There is no puzzle file {path}", hint="Name one with --from FILE.") from error
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a file of puzzles: {error}") from error
    if not cells:
        raise DataError(f"{path} is empty")
    header = [cell.strip().lower() for cell in cells[0][1]]
    if not set(header) & set(_QUESTION_NAMES):
        return [Row(line, row[0], _cell(row, 1), None) for line, row in cells]
    question, answer = _column(header, _QUESTION_NAMES), _column(header, _ANSWER_NAMES)
    source = _column(header, ("source",))
    return [
        Row(line, _cell(row, question) or "", _cell(row, answer), _cell(row, source))
        for line, row in cells[1:]
    ]


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", newline="")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")  # spreadsheets write a byte order mark


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def _cell(row: Sequence[str], column: int | None) -> str | None:
    return row[column] or None if column is not None and column < len(row) else None

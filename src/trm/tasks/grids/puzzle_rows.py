"""The rows of a file of puzzles, as text.

A file is CSV with a header, CSV without one (question, answer), or text with one puzzle per line. Columns are
separated by commas, semicolons or tabs. The file may be compressed by gzip or xz, and it may be hostile, so
bytes, lines and rows that are too short to be puzzles are limited while it is read.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import LimitedStream, open_input
from macbook_optimization.units import MIB

Numbered: TypeAlias = tuple[int, list[str]]  # the number of a line, and its cells

STANDARD_INPUT = Path("-")
_QUESTION_NAMES = ("question", "puzzle", "quizzes", "quiz", "q")
_ANSWER_NAMES = ("answer", "solution", "solutions", "a")
_SOURCE_NAMES = ("source",)
_RATING_NAMES = ("rating",)
_DELIMITERS = ",;\t"
_MAX_LINE_BYTES = 4_000_000  # the limit of Python for one cell is 131,072 characters
_MAX_SHORT_ROWS = 100_000  # more than this, and more than half, cannot be puzzles
_BUFFER_BYTES = MIB
_MAX_SHOWN_COLUMNS = 8
_MAX_SHOWN_LENGTH = 40
_WORD = re.compile(r"[^\W\d][\w -]*")  # starts with a letter, in any script
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"
_OTHER_FILE = "Name a regular file with --from, or - for standard input."
_LIMIT_HINT = "Raise the limit with --max-input-mb, or data.build.max_input_mb in a recipe."


@dataclass(frozen=True, slots=True)
class Row:
    """One puzzle of a file."""

    line: int  # counted from 1, for messages
    question: str
    answer: str | None = None
    source: str | None = None
    rating: str | None = None


def read_rows(path: Path, num_cells: int, max_bytes: int) -> list[Row]:
    """Read the rows of puzzles with this many cells from a file of at most `max_bytes`, once unpacked."""
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        with _open(path) as stream:
            unpacked = _unpacked(stream, path.suffix)
            limited = LimitedStream(unpacked, name, max_bytes, _MAX_LINE_BYTES, _LIMIT_HINT)
            buffered = io.BufferedReader(limited, _BUFFER_BYTES)
            text = io.TextIOWrapper(buffered, "utf-8-sig", newline="")  # spreadsheets write a mark first
            rows = _rows(_table(text, num_cells, name), num_cells, name)
    except FileNotFoundError as error:
        raise DataError(f"There is no puzzle file {path}", hint="Name one with --from FILE.") from error
    except OSError as error:
        raise _unreadable(name, reason_of(error), hint_for(error, _OTHER_FILE)) from error
    except MemoryError as error:
        raise _unreadable(name, "it does not fit into memory", "Use a part of it.") from error
    except (EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(name, str(error)) from error
    if not rows:
        raise DataError(f"{name} is empty")
    return rows


def _unreadable(name: str, reason: str, hint: str | None = None) -> DataError:
    return DataError(f"{name} cannot be read as a file of puzzles: {reason}", hint=hint)


def _open(path: Path) -> AbstractContextManager[io.BufferedReader]:
    if path != STANDARD_INPUT:
        return open_input(path)
    if sys.stdin is None:
        raise DataError("Standard input is closed", hint=_OTHER_FILE)
    return nullcontext(cast(io.BufferedReader, sys.stdin.buffer))


def _unpacked(stream: io.BufferedReader, suffix: str) -> BinaryIO:
    start = stream.peek(len(_XZ))
    if suffix == ".xz" or start.startswith(_XZ):
        return cast(BinaryIO, lzma.LZMAFile(stream))
    if suffix == ".gz" or start.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    return stream


def _rows(table: Iterator[Numbered], num_cells: int, name: str) -> list[Row]:
    first = next(table, None)
    if first is None:
        return []
    header = [cell.strip().lower() for cell in first[1]]
    question = _column(header, _QUESTION_NAMES)
    if question is None:
        if _is_header(first[1], num_cells):
            raise _unknown_header(first[1], name)
        return [Row(line, cells[0], _cell(cells, 1)) for line, cells in chain([first], table)]
    _refuse_repeated_columns(header, name)
    answer = _column(header, _ANSWER_NAMES)
    source = _column(header, _SOURCE_NAMES)
    rating = _column(header, _RATING_NAMES)
    return [
        Row(
            line=line,
            question=_cell(cells, question) or "",
            answer=_cell(cells, answer),
            source=_cell(cells, source),
            rating=_cell(cells, rating),
        )
        for line, cells in table
    ]


def _table(lines: Iterable[str], num_cells: int, name: str) -> Iterator[Numbered]:
    """Yield the line number and the cells of every row that is not empty."""
    lines = iter(lines)
    head: list[str] = []  # up to the first line with text, which shows the delimiter
    for line in lines:
        head.append(line)
        if line.strip() or len(head) > _MAX_SHORT_ROWS:
            break
    reader = csv.reader(chain(head, lines), delimiter=_delimiter(head[-1] if head else ""))
    num_short = 0
    for number, cells in enumerate(reader, start=1):
        if max(map(len, cells), default=0) < num_cells:
            num_short += 1
            if num_short > max(_MAX_SHORT_ROWS, number / 2):
                raise _unreadable(name, f"{num_short:,} of {number:,} rows have fewer than {num_cells} cells")
        if any(cells):
            yield reader.line_num, cells


def _delimiter(line: str) -> str:
    """Return the delimiter for which this line names a question or, if none does, has the most cells."""

    def fitness(delimiter: str) -> tuple[bool, int]:
        cells = next(csv.reader([line], delimiter=delimiter), [])
        names = [cell.strip().lower() for cell in cells]
        return _column(names, _QUESTION_NAMES) is not None, len(cells)

    return max(_DELIMITERS, key=fitness)


def _is_header(cells: Sequence[str], num_cells: int) -> bool:
    """Return whether a row has names of columns rather than a puzzle: words, of another length."""
    return all(_WORD.fullmatch(cell.strip()) and len(cell) != num_cells for cell in cells if cell.strip())


def _unknown_header(cells: Sequence[str], name: str) -> DataError:
    found = ", ".join(repr(cell.strip()[:_MAX_SHOWN_LENGTH]) for cell in cells[:_MAX_SHOWN_COLUMNS])
    return DataError(
        f"{name}: the header has {found}; none of its columns is the question",
        hint=f"Name the question {_one_of(_QUESTION_NAMES)}, and the answer {_one_of(_ANSWER_NAMES)}. "
        "Without a header, the first column is the question and the second the answer.",
    )


def _refuse_repeated_columns(header: Sequence[str], name: str) -> None:
    """Refuse a header that does not say which of several columns is meant."""
    used = (*_QUESTION_NAMES, *_ANSWER_NAMES, *_SOURCE_NAMES, *_RATING_NAMES)
    repeated = [column for column in used if header.count(column) > 1]
    if repeated:
        raise DataError(
            f"{name}: the header has {header.count(repeated[0])} columns named {repeated[0]!r}",
            hint="Remove or rename all but one.",
        )


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the index of the first of these names that the header has."""
    return next((header.index(name) for name in names if name in header), None)


def _cell(cells: Sequence[str], column: int | None) -> str | None:
    if column is None or column >= len(cells):
        return None
    return cells[column] or None

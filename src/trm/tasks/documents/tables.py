"""Messages that are rows of a table: CSV, JSON, or JSON Lines.

A row becomes a message in the format of mail, so that everything after this module sees one kind of input.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from macbook_optimization.errors import DataError
from trm.tasks.documents.charsets import decode_bytes
from trm.tasks.documents.mail import TOO_LARGE
from trm.tasks.documents.mime import MAX_MESSAGE_BYTES

MAX_JSON_BYTES = 64 * 2**20  # a JSON file is read as a whole, a JSON Lines file is not
COLUMN_NAMES = {
    "subject": ("subject", "title", "konu", "başlık"),
    "body": ("body", "text", "message", "content", "email", "mail", "raw", "metin", "ileti", "mesaj"),
    "sender": ("sender", "from", "from_address", "gönderen", "kimden"),
    "category": ("category", "label", "labels", "class", "folder", "target", "kategori", "etiket", "sınıf"),
    "date": ("date", "sent", "time", "timestamp", "tarih"),
}
_DELIMITERS = ",;\t|"
_STARTS_WITH_HEADERS = re.compile(
    r"(?:from \S.*\n)?(?:return-path|received|delivered-to|message-id|mime-version|date|from|to|subject):.*\n"
    r"(?:[!-9;-~]{1,60}:|[ \t]).*\n",
    re.IGNORECASE,
)
_STARTS_AS_HTML = re.compile(r"\s{0,99}<(?:!doctype html|html|head|body|table|div|p)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One row, as a message."""

    number: int  # the byte offset of a line of JSON Lines; elsewhere counted from 1
    end_offset: int  # bytes of the table up to its end
    raw: bytes = b""
    labels: tuple[str, ...] = ()
    problem: str = ""  # why there is no message


def read_csv(stream: BinaryIO, name: str) -> Iterator[Row]:
    """Yield the rows of a table with a header line and commas, semicolons, tabs or bars between columns."""
    lines = _Lines(stream, name)
    first = next(lines, "").removeprefix("\ufeff")
    delimiter = guess_delimiter(first)
    names = next(csv.reader([first], delimiter=delimiter), [])
    columns = find_columns(names)
    if not columns.keys() & {"subject", "body"}:
        raise _no_text(name, names)
    _refuse_repeated_columns(names, columns, name)
    earlier_limit = csv.field_size_limit(MAX_MESSAGE_BYTES)
    try:
        for number, cells in enumerate(csv.reader(lines, delimiter=delimiter), 1):
            if cells:
                yield _row(number, lines.num_bytes, dict(zip(names, cells, strict=False)), columns)
    except csv.Error as error:
        raise DataError(f"{name}, line {lines.num_lines}: {error}.", hint="Check its quotes.") from error
    finally:
        csv.field_size_limit(earlier_limit)


def read_json(stream: BinaryIO, name: str) -> Iterator[Row]:
    """Yield the objects of a list, which may be the only list in an object."""
    content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise DataError(
            f"{name} is larger than {MAX_JSON_BYTES // 2**20} MiB, the limit for JSON.",
            hint="Convert it to JSON Lines, which has no limit: jq -c '.[]' FILE > FILE.jsonl",
        )
    try:
        found = json.loads(decode_bytes(content, "").removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} is not JSON: {error}.", hint="Is it JSON Lines? Use --format jsonl."
        ) from error
    rows = found
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [found]
    if not isinstance(rows, list):
        raise DataError(f"{name} has no list of messages.")
    for number, row in enumerate(rows, 1):
        yield _object_row(number, len(content) * number // len(rows), row, name if number == 1 else None)


def read_jsonl(stream: BinaryIO, name: str, offset: int = 0) -> Iterator[Row]:
    """Yield the objects of a stream that is positioned at `offset`. A bad line costs only itself."""
    position = offset
    while line := stream.readline(MAX_MESSAGE_BYTES + 1):
        start = position
        position += len(line)
        if len(line) > MAX_MESSAGE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(2**20)
                position += len(line)
            yield Row(start, position, problem=TOO_LARGE)
            continue
        text = decode_bytes(line, "").removeprefix("\ufeff").strip()
        if not text:
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            yield Row(start, position, problem="not a line of JSON")
            continue
        yield _object_row(start, position, value, name if start == 0 else None)


def find_columns(names: Sequence[str]) -> dict[str, str]:
    """Return which column holds the subject, body, sender, category and date, as far as names tell."""
    by_folded_name = {_folded(name): name for name in reversed(names)}
    return {
        field: by_folded_name[synonym]
        for field, synonyms in COLUMN_NAMES.items()
        for synonym in reversed(synonyms)
        if synonym in by_folded_name
    }


def _folded(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _refuse_repeated_columns(names: Sequence[str], columns: Mapping[str, str], name: str) -> None:
    """Refuse a header that does not say which of several columns is meant."""
    folded = [_folded(each) for each in names]
    repeated = [column for column in columns.values() if folded.count(_folded(column)) > 1]
    if repeated:
        raise DataError(
            f"{name}: the header has {folded.count(_folded(repeated[0]))} columns named {repeated[0]!r}.",
            hint="Remove or rename all but one.",
        )


def guess_delimiter(header: str) -> str:
    """Return the delimiter that makes the most known column names of a header line."""

    def num_known(delimiter: str) -> int:
        return len(find_columns(next(csv.reader([header], delimiter=delimiter), [])))

    return max(_DELIMITERS, key=num_known)


def compose(fields: Mapping[str, str]) -> bytes:
    """Write subject, sender, date and body as a message."""
    body = fields.get("body", "")
    if not fields.get("subject") and _STARTS_WITH_HEADERS.match(body[:4000]):
        return body.encode("utf-8", "replace")  # the column has whole messages
    kind = "html" if _STARTS_AS_HTML.match(body) else "plain"
    headers = [
        f"{header}: {' '.join(fields[field].split())}"
        for header, field in (("From", "sender"), ("Date", "date"), ("Subject", "subject"))
        if fields.get(field)
    ]
    headers.append(f"Content-Type: text/{kind}; charset=utf-8")
    return "\n".join([*headers, "", body]).encode("utf-8", "replace")


def _row(number: int, end_offset: int, values: Mapping[str, object], columns: Mapping[str, str]) -> Row:
    fields = {field: _text(values.get(name)) for field, name in columns.items()}
    category = values.get(columns.get("category", ""))
    labels = category if isinstance(category, list) else [category]
    raw = compose(fields)
    return Row(
        number,
        end_offset,
        raw if len(raw) <= MAX_MESSAGE_BYTES else b"",
        tuple(text for label in labels if (text := " ".join(_text(label).split()))),
        "" if len(raw) <= MAX_MESSAGE_BYTES else TOO_LARGE,
    )


def _object_row(number: int, end_offset: int, value: object, first_of: str | None) -> Row:
    """Return an object as a row. The first object of a table must have a text; others are skipped without."""
    if not isinstance(value, dict):
        return Row(number, end_offset, problem="not a JSON object")
    columns = find_columns(list(value))
    if not columns.keys() & {"subject", "body"}:
        if first_of is not None:
            raise _no_text(first_of, list(value))
        return Row(number, end_offset, problem="has neither subject nor body")
    return _row(number, end_offset, value, columns)


def _text(value: object) -> str:
    if value is None or isinstance(value, dict | list):
        return ""
    return value if isinstance(value, str) else str(value)


def _no_text(name: str, names: Sequence[str]) -> DataError:
    found = ", ".join(names[:20]) or "none"
    return DataError(
        f"{name} has neither a subject nor a body. Its columns: {found[:500]}.",
        hint=f"Name a column one of {', '.join(COLUMN_NAMES['body'][:5])} (and subject, sender, category).",
    )


class _Lines:
    """The lines of a table as text, each of bounded length, and how many bytes were read."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.num_bytes = 0
        self.num_lines = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(MAX_MESSAGE_BYTES + 1)
        if not line:
            raise StopIteration
        self.num_bytes += len(line)
        self.num_lines += 1
        if len(line) > MAX_MESSAGE_BYTES:
            raise DataError(f"{self._name}, line {self.num_lines} is {TOO_LARGE}.", hint="Is it a CSV file?")
        return decode_bytes(line, "")

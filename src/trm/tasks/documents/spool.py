"""The state of an import of mail, in a directory beside the dataset, so that it can be continued.

Four files grow together: one line of facts per message, and for each message that can be used its digest, its
signature and its content. `state.json` has their sizes at the last checkpoint; what is behind those is cut
off when the import continues. The directory holds text of messages: only its owner may read it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.durable_files import exclusive_lock, make_directory, replace_file, sync
from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.json_types import JsonObject, parse_json
from macbook_optimization.units import counted
from trm.arrays import BoolArray, IntegerArray
from trm.tasks.documents.duplicates import (
    DIGEST_BYTES,
    SIGNATURE_BYTES,
    Digests,
    SignaturesOf,
    as_digests,
    as_signatures,
)
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.records import Facts, Record, unpack_content
from trm.tasks.documents.sources import Position

STATE_FILE = "state.json"
FACTS_FILE, DIGESTS_FILE, SIGNATURES_FILE, CONTENTS_FILE = "facts.jsonl", "digests", "signatures", "contents"
_LOCK_FILE = "lock"
_SIZE = struct.Struct("<I")  # of a content, before it
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class State:
    """The progress of an import."""

    identity: JsonObject  # of what is imported: see `importing.identity_of`
    position: Position = field(default_factory=Position)
    num_messages: int = 0
    num_documents: int = 0  # messages that can be used
    facts_bytes: int = 0
    contents_bytes: int = 0
    is_complete: bool = False

    def sizes(self) -> dict[str, int]:
        return {
            FACTS_FILE: self.facts_bytes,
            DIGESTS_FILE: DIGEST_BYTES * self.num_documents,
            SIGNATURES_FILE: SIGNATURE_BYTES * self.num_documents,
            CONTENTS_FILE: self.contents_bytes,
        }

    def save(self, directory: Path) -> None:
        replace_file(directory / STATE_FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, directory: Path) -> State:
        """Raise `OSError`, or `ValueError` or `TypeError` if it is not a state."""
        values = parse_json((directory / STATE_FILE).read_bytes())
        return cls(**{**values, "position": Position(**values["position"])})


class Spool:
    """Reads what was recorded. Open one with `open_spool`."""

    def __init__(self, directory: Path, state: State) -> None:
        self.directory = directory
        self.state = state

    def facts(self) -> Iterator[Facts]:
        """Yield the facts of all messages, those that were skipped included."""
        with self._reading(FACTS_FILE) as file:
            for line in islice(file, self.state.num_messages):
                yield Facts.from_line(line)

    def digests(self) -> Digests:
        with open(self.directory / DIGESTS_FILE, "rb") as file:
            return as_digests(file.read(DIGEST_BYTES * self.state.num_documents))

    @contextmanager
    def signatures(self) -> Iterator[SignaturesOf]:
        """Yield a function that reads the signatures of some documents."""
        with open(self.directory / SIGNATURES_FILE, "rb") as file:
            yield lambda numbers: _read_rows(file.fileno(), numbers)

    def mails(self, is_chosen: BoolArray) -> Iterator[Mail]:
        """Yield the contents of some documents, in their order."""
        with self._reading(CONTENTS_FILE) as file:
            for chosen in is_chosen.data:
                (size,) = _SIZE.unpack(file.read(_SIZE.size))
                if chosen:
                    yield unpack_content(file.read(size))
                else:
                    file.seek(size, os.SEEK_CUR)

    @contextmanager
    def _reading(self, name: str) -> Iterator[BinaryIO]:
        path = self.directory / name
        try:
            with open(path, "rb", _READ_BYTES) as file:
                yield file
        except (ValueError, struct.error, zlib.error) as error:
            hint = f"Remove {self.directory} and start again."
            raise DataError(f"{path} is damaged: {error}", hint=hint) from error


def _read_rows(descriptor: int, numbers: IntegerArray) -> NDArray[np.uint32]:
    wanted, places = np.unique(numbers, return_inverse=True)
    gaps = np.flatnonzero(np.diff(wanted) > 1) + 1
    runs = [(int(run[0]), len(run)) for run in np.split(wanted, gaps) if len(run)]
    parts = [os.pread(descriptor, count * SIGNATURE_BYTES, first * SIGNATURE_BYTES) for first, count in runs]
    rows: NDArray[np.uint32] = as_signatures(b"".join(parts))[places.reshape(-1)]
    return rows


class SpoolWriter:
    """Appends records. `checkpoint` makes them safe; leaving it does so as well, also by Ctrl-C."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.state = spool.state
        self.files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        with self._reported():
            for name, size in self.state.sizes().items():
                path = self.spool.directory / name
                self.files[name] = open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", _READ_BYTES)
                self.files[name].truncate(size)
                self.files[name].seek(size)
        return self

    def append(self, message: Message, record: Record) -> None:
        line = replace(record.facts, key=message.key, folders=message.labels).to_line()
        is_document = record.facts.verdict != "skipped"
        with self._reported():
            self.files[FACTS_FILE].write(line)
            if is_document:
                mark = record.fingerprint
                self.files[DIGESTS_FILE].write(mark.digest or bytes(DIGEST_BYTES))
                self.files[SIGNATURES_FILE].write(mark.signature or bytes(SIGNATURE_BYTES))
                self.files[CONTENTS_FILE].write(_SIZE.pack(len(record.content)) + record.content)
        # Only now, in one assignment: Ctrl-C may come between any two of these lines.
        self.state = replace(
            self.state,
            position=self.state.position.after(message),
            num_messages=self.state.num_messages + 1,
            num_documents=self.state.num_documents + is_document,
            facts_bytes=self.state.facts_bytes + len(line),
            contents_bytes=self.state.contents_bytes + is_document * (_SIZE.size + len(record.content)),
        )

    def checkpoint(self) -> None:
        state = self.state
        if state == self.spool.state:
            return
        with self._reported():
            for name, file in self.files.items():
                file.flush()
                sync(self.spool.directory / name)
            state.save(self.spool.directory)
        self.spool.state = state

    def complete(self) -> None:
        self.state = replace(self.state, is_complete=True)
        self.checkpoint()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.checkpoint()
        except DataError:  # a full disk, which has been reported
            if error is None:
                raise
        finally:
            for file in self.files.values():
                with suppress(OSError):  # the rest of the buffer cannot be written either
                    file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"Cannot write to {self.spool.directory}: {reason_of(error)}",
                hint=hint_for(error, "Choose another --out."),
            ) from error


@contextmanager
def open_spool(directory: Path, identity: JsonObject, tell: Callable[[str], None]) -> Iterator[Spool]:
    """Yield the spool of an interrupted import of the same mail, or an empty one.

    `tell` receives the reason if an earlier import cannot be continued, and what is left after an exception.
    """
    _make_private(directory)
    with exclusive_lock(directory / _LOCK_FILE) as lock:
        if isinstance(lock, str):
            raise DataError(
                f"Process {lock} is importing mail to {directory}",
                hint="Wait for it, or choose another --out.",
            )
        state, problem = _earlier_state(directory, identity)
        if state is None:
            if problem:
                tell(f"The import in {directory} starts anew: {problem}.")
            state = State(identity)
            state.save(directory)
        spool = Spool(directory, state)
        try:
            yield spool
        except BaseException:
            if spool.state.num_messages:
                kept = counted(spool.state.num_messages, "message")
                tell(f"{directory} keeps {kept}. The same command continues.")
            raise


def remove_spool(directory: Path) -> None:
    """Remove an import, if there is one. Nothing else is ever removed."""
    if directory.is_dir() and not _other_files(directory):
        shutil.rmtree(directory, ignore_errors=True)


def _make_private(directory: Path) -> None:
    make_directory(directory.parent)
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    if others := _other_files(directory):
        raise DataError(
            f"{directory} exists and is not an import of mail: it has {others[0]}",
            hint="Choose another --out.",
        )


def _other_files(directory: Path) -> list[str]:
    own = (FACTS_FILE, DIGESTS_FILE, SIGNATURES_FILE, CONTENTS_FILE, STATE_FILE, _LOCK_FILE)
    return [
        name
        for name in os.listdir(directory)
        if name not in own and not name.startswith(f".{STATE_FILE}.")  # while it is replaced
    ]


def _earlier_state(directory: Path, identity: JsonObject) -> tuple[State | None, str]:
    """Return how far an earlier import of the same mail came, or why there is none to continue."""
    try:
        state = State.load(directory)
        sizes = {name: os.path.getsize(directory / name) for name, size in state.sizes().items() if size}
    except FileNotFoundError as error:
        is_first = Path(error.filename).name == STATE_FILE
        return None, "" if is_first else f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError):
        return None, f"{STATE_FILE} is damaged"
    if problem := _difference(state.identity, identity):
        return None, problem
    if short := [name for name, size in sizes.items() if size < state.sizes()[name]]:
        return None, f"{short[0]} is incomplete"
    return state, ""


def _difference(before: JsonObject, now: JsonObject) -> str:
    """Return what has changed since an import was begun, in words."""
    if None in now["sources"]:
        return "standard input cannot be read again"
    if before.get("format") != now["format"]:
        return "it was begun by another version of this program"
    if [each and each["path"] for each in before["sources"]] != [each["path"] for each in now["sources"]]:
        return "it was begun with other sources"
    for earlier, each in zip(before["sources"], now["sources"], strict=True):
        if earlier != each:
            return f"{each['path']} has changed"
    return "" if before == now else "it was begun with other options"

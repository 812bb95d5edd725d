"""From the messages of a spool to labelled documents, split into training and test set.

Texts stay on disk, and about a hundred bytes per message are in memory: a mailbox may have millions.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from macbook_optimization.errors import DataError
from macbook_optimization.memory_readings import return_freed_memory
from trm.arrays import BoolArray, IntArray, IntegerArray
from trm.config import Fraction
from trm.display import Display
from trm.tasks.documents.duplicates import Groups, group_copies, mixed
from trm.tasks.documents.labels import (
    CategoryMap,
    LabelCounts,
    category_of,
    default_map,
    describe_unused,
    load_map,
)
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.quality import QualityCounter, QualityReport
from trm.tasks.documents.records import Facts
from trm.tasks.documents.splits import SplitRules, SplitTable, choose_rows, name_without_words, thread_number
from trm.tasks.documents.spool import Spool
from trm.tasks.documents.tokens import TokenOptions

MAX_VOCABULARY_CHARACTERS = 2**26  # of the messages that a vocabulary is made of: about 50,000 messages


class SourceOptions(TokenOptions):
    """The mail that a dataset is made of."""

    source: list[str] = Field(alias="from", min_length=1)
    """Mailboxes, directories or tables to read."""
    test_share: Fraction = 0.15
    """Share of the messages in the test set."""
    split: Literal["random", "time", "thread"] = "random"
    """Choice of the test set: at random, the newest messages, or whole conversations."""
    seed: int = 0
    """Seed of the split."""


class MailBuildOptions(SourceOptions):
    """The mail that a dataset is made of, and its categories."""

    mapping: str | None = None
    """YAML file that says which folders and labels are which category; null for the folders themselves."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed message whose category is known."""

    mail: Mail
    category: str


class Part(Protocol):
    """Documents that can be iterated over several times: a list, or a part of a spool."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Document]: ...


@dataclass(frozen=True, slots=True)
class Documents:
    train: Part
    test: Part
    categories: tuple[str, ...]
    sample: Part | None = None  # of the training set, that the vocabulary is made of [default: all of it]


@dataclass(frozen=True, slots=True)
class SpooledPart:
    """Some documents of a spool, read from disk each time."""

    spool: Spool
    rows: NDArray[np.int32]  # in ascending order
    labels: NDArray[np.int32]  # their categories, by number
    categories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Document]:
        is_chosen = np.zeros(self.spool.state.num_documents, dtype=np.bool_)
        is_chosen[self.rows] = True
        for mail, label in zip(self.spool.mails(is_chosen), self.labels.data, strict=True):
            yield Document(mail, self.categories[label])

    def part(self, chosen: BoolArray | IntArray) -> SpooledPart:
        return SpooledPart(self.spool, self.rows[chosen], self.labels[chosen], self.categories)


def collect_documents(
    spool: Spool, options: MailBuildOptions, display: Display
) -> tuple[Documents, QualityReport]:
    """Find the category of each message, show what the mail is like, and choose the test set."""
    display.status("Finding categories and copies")
    columns = _Columns.of(spool, options.split)
    mapping = None if options.mapping is None else load_map(Path(options.mapping))
    for problem in [] if mapping is None else describe_unused(mapping, columns.label_counts):
        display.message(f"warning: {problem}")
    return _collect(spool, columns, columns.categories(mapping), options, display)


def collect_unlabelled(
    spool: Spool, options: SourceOptions, display: Display
) -> tuple[Documents, QualityReport]:
    """Show what the mail is like, and choose the test set. The category of every message is empty."""
    display.status("Finding copies")
    columns = _Columns.of(spool, options.split)
    return _collect(spool, columns, [""] * len(columns.kinds), options, display)


def _collect(
    spool: Spool,
    columns: _Columns,
    category_of_kind: Sequence[str | None],
    options: SourceOptions,
    display: Display,
) -> tuple[Documents, QualityReport]:
    used = _used(spool, columns, category_of_kind)
    with spool.signatures() as signatures_of:
        copies = group_copies(spool.digests()[used.rows], lambda rows: signatures_of(used.rows[rows]))
    return_freed_memory()
    report = columns.report(category_of_kind, copies)
    display.message(report.text())
    if not len(used):
        raise DataError(
            "No message has a category" if columns.kinds else "There is no message that can be read",
            hint="Use a directory whose folders are the categories, or a mapping.",
        )
    is_test = _choose_test(used, columns, copies.near, options)
    if is_test.all() or not is_test.any():
        raise DataError(
            f"There are too few messages for a training set and a test set: {len(used)}",
            hint="Copies stay together. Use more mail, or another share (--test-share).",
        )
    train = used.part(~is_test)
    sample = choose_sample(np.asarray(columns.num_characters)[train.rows], MAX_VOCABULARY_CHARACTERS)
    return Documents(train, used.part(is_test), used.categories, train.part(sample)), report


def _choose_test(used: SpooledPart, columns: _Columns, copies: IntArray, options: SourceOptions) -> BoolArray:
    digests = used.spool.digests()
    table = SplitTable(
        lambda row: columns.wordless.get(int(used.rows[row])) or digests[used.rows[row]].tobytes(),
        copies,
        used.labels,
        np.asarray(columns.dates)[used.rows if columns.dates else []],
        np.asarray(columns.threads)[used.rows if columns.threads else []],
    )
    return choose_rows(table, SplitRules(options.split, options.test_share, options.seed))


def choose_sample(num_characters: IntegerArray, limit: int) -> IntArray:
    """Return which messages a vocabulary is made of: all, or as many as the limit allows, in random order."""
    count = len(num_characters)
    if num_characters.sum(dtype=np.int64) <= limit:
        return np.arange(count)
    order = np.argsort(mixed(np.arange(1, count + 1, dtype=np.uint64)), kind="stable")
    fits = np.cumsum(num_characters[order], dtype=np.int64) <= limit
    chosen: IntArray = np.sort(order[fits])
    return chosen


_Kind = tuple[tuple[str, ...], tuple[str, ...]]  # folders and labels, which decide about the category


@dataclass(slots=True)
class _Columns:
    """The facts of all messages in compact form: entries per document, and counts."""

    has_words: BoolArray
    split: str
    kinds: dict[_Kind, int] = field(default_factory=dict)  # and their numbers
    label_counts: LabelCounts = field(default_factory=LabelCounts)
    tally: Counter[tuple[int, Facts]] = field(default_factory=Counter)  # of what the report needs
    kind: array[int] = field(default_factory=lambda: array("i"))
    dates: array[float] = field(default_factory=lambda: array("d"))  # for a split by time
    threads: array[int] = field(default_factory=lambda: array("Q"))  # for a split by thread
    num_characters: array[int] = field(default_factory=lambda: array("I"))
    wordless: dict[int, bytes] = field(default_factory=dict)  # names of documents that have no digest

    @classmethod
    def of(cls, spool: Spool, split: str) -> _Columns:
        columns = cls(np.any(spool.digests(), axis=1), split)
        for facts in spool.facts():
            columns.add(facts)
        return columns

    def add(self, facts: Facts) -> None:
        kind = -1
        if facts.verdict != "skipped":
            kind = self.kinds.setdefault((facts.folders, facts.labels), len(self.kinds))
            self.label_counts.add(facts.folders, facts.labels)
            if not self.has_words[len(self.kind)]:
                self.wordless[len(self.kind)] = name_without_words(facts.key)
            self.kind.append(kind)
            if self.split == "time":
                self.dates.append(np.nan if facts.date is None else facts.date)
            if self.split == "thread":
                self.threads.append(thread_number(facts.thread))
            self.num_characters.append(facts.num_characters)
        self.tally[kind, Facts(facts.verdict, facts.reason, facts.is_empty, facts.language)] += 1

    def categories(self, mapping: CategoryMap | None) -> list[str | None]:
        """Return the category of each kind."""
        used = mapping or default_map(self.label_counts)
        return [category_of(folders, labels, used) for folders, labels in self.kinds]

    def report(self, category_of_kind: Sequence[str | None], copies: Groups) -> QualityReport:
        counter = QualityCounter()
        for (kind, facts), count in self.tally.items():
            category = None if kind < 0 else category_of_kind[kind]
            counter.add(facts, category, facts.language, count)
        return counter.report(copies)


def _used(spool: Spool, columns: _Columns, category_of_kind: Sequence[str | None]) -> SpooledPart:
    """Return the documents that have a category."""
    categories = tuple(sorted({name for name in category_of_kind if name is not None}))
    numbers = {name: number for number, name in enumerate(categories)}
    of_kind = [-1 if name is None else numbers[name] for name in category_of_kind]
    labels = np.array(of_kind, dtype=np.int32)[np.asarray(columns.kind)]
    rows = np.flatnonzero(labels >= 0).astype(np.int32)
    return SpooledPart(spool, rows, labels[rows], categories)

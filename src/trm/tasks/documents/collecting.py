"""From the sources that a recipe names to labelled documents, split into training and test set.

The texts of all messages are in memory while a dataset is built from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from macbook_optimization.errors import DataError
from trm.config import Fraction
from trm.tasks.base import Progress
from trm.tasks.documents.duplicates import Fingerprint, fingerprint
from trm.tasks.documents.labels import LabelCounts, category_of, default_map, load_map
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.mailboxes import Message, num_source_bytes, read_messages
from trm.tasks.documents.parse_pool import parse_messages
from trm.tasks.documents.splits import SplitItem, SplitRules, choose_test
from trm.tasks.documents.tokens import TokenOptions


class SourceOptions(TokenOptions):
    """Which mail a dataset is made of."""

    source: list[str] = Field(alias="from", min_length=1)
    """Mailboxes, directories or tables to read."""
    test_share: Fraction = 0.15
    """Share of the messages in the test set."""
    split: Literal["random", "time", "thread"] = "random"
    """How the test set is chosen: at random, the newest messages, or whole conversations."""
    seed: int = 0
    """Seed of the split."""


class MailBuildOptions(SourceOptions):
    """Which mail a dataset is made of, and what its categories are."""

    mapping: str | None = None
    """YAML file that says which folders and labels are which category; null for the folders themselves."""


_Read: TypeAlias = tuple[Message, Mail, Fingerprint]


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed message and its category; a category may be empty where none is needed."""

    mail: Mail
    category: str


@dataclass(frozen=True, slots=True)
class Documents:
    train: list[Document]
    test: list[Document]
    categories: tuple[str, ...]


def collect_documents(options: MailBuildOptions, progress: Progress, jobs: int) -> Documents:
    """Read and parse the sources, and split the messages that have a category."""
    counts = LabelCounts()
    read = _read(options, progress, jobs)
    for message, mail, _ in read:
        counts.add(message.labels, mail.labels)
    mapping = default_map(counts) if options.mapping is None else load_map(Path(options.mapping))
    categories = [category_of(message.labels, mail.labels, mapping) for message, mail, _ in read]
    if not any(category is not None for category in categories):
        raise DataError(
            "No message has a category",
            hint="Use a directory whose folders are the categories, or a mapping.",
        )
    return _split(read, categories, options)


def collect_unlabelled(options: SourceOptions, progress: Progress, jobs: int) -> Documents:
    """Read and parse the sources, and split all messages; their category is empty."""
    read = _read(options, progress, jobs)
    if not read:
        raise DataError("There is no message that can be read", hint="Check the paths.")
    return _split(read, [""] * len(read), options)


def _read(options: SourceOptions, progress: Progress, jobs: int) -> list[_Read]:
    parsed = parse_messages(_messages(options.source, progress), jobs)
    return [(message, mail, fingerprint(mail)) for message, mail in parsed if mail.verdict != "skipped"]


def _split(read: list[_Read], categories: Sequence[str | None], options: SourceOptions) -> Documents:
    """Split the messages whose category is not None."""
    documents: list[Document] = []
    items: list[SplitItem] = []
    for (message, mail, mark), category in zip(read, categories, strict=True):
        if category is not None:
            documents.append(Document(mail, category))
            items.append(SplitItem(message.key, category, mark, mail.date, mail.thread))
    is_test = choose_test(items, SplitRules(options.split, options.test_share, options.seed))
    return Documents(
        train=[each for each, chosen in zip(documents, is_test, strict=True) if not chosen],
        test=[each for each, chosen in zip(documents, is_test, strict=True) if chosen],
        categories=tuple(sorted({each.category for each in documents})),
    )


def _messages(sources: list[str], progress: Progress) -> Iterator[Message]:
    total = max(1, sum(num_source_bytes(source) or 0 for source in sources))
    done = 0
    for source in sources:
        for message in read_messages(source):
            progress("reading mail", min(done + message.end_offset, total - 1), total)
            yield Message(message.key, message.raw, message.labels, problem=message.problem)
        done += num_source_bytes(source) or 0
    progress("reading mail", total, total)

"""The test set of a collection of mail: at random, the newest, or whole conversations.

Copies and near-copies of a message are always on the same side, since a model that has seen one of them knows
the other. A split depends on the seed and on what the messages say, not on their order or their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.errors import ConfigError
from trm.arrays import BoolArray, FloatArray, IntArray, IntegerArray, WordArray
from trm.tasks.documents.duplicates import Fingerprint, find_duplicates, join, roots

Method = Literal["random", "time", "thread"]


@dataclass(frozen=True, slots=True)
class SplitRules:
    method: Method = "random"  # stratified by category; the newest messages; or whole threads at random
    test_share: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SplitItem:
    """The facts of a message that a split needs."""

    key: str
    category: str
    fingerprint: Fingerprint
    date: float | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class SplitTable:
    """The facts of messages that a split needs, one row each: a large mailbox has millions."""

    name_of: Callable[[int], bytes]  # of what a message says: its digest, or its key if it has no words
    copies: IntArray  # the first message of those that are copies of each other
    categories: IntegerArray  # numbered in the order of their names
    dates: FloatArray  # NaN where it is not known; only for a split by time
    threads: WordArray  # from `thread_number`; only for a split by thread

    @classmethod
    def of(cls, items: Sequence[SplitItem]) -> SplitTable:
        number_of = {name: number for number, name in enumerate(sorted({item.category for item in items}))}
        return cls(
            lambda row: items[row].fingerprint.digest or name_without_words(items[row].key),
            find_duplicates([item.fingerprint for item in items]).near,
            np.array([number_of[item.category] for item in items], dtype=np.int64),
            np.array([np.nan if item.date is None else item.date for item in items], dtype=np.float64),
            np.array([thread_number(item.thread) for item in items], dtype=np.uint64),
        )


def name_without_words(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # names of files need not be UTF-8


def thread_number(thread: str) -> int:
    """Return a number of 64 bits, equal for equal threads; 0 for a message without."""
    if not thread:
        return 0
    content = thread.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") or 1


def choose_test(items: Sequence[SplitItem], rules: SplitRules) -> BoolArray:
    """Return which messages are in the test set."""
    return choose_rows(SplitTable.of(items), rules)


def choose_rows(table: SplitTable, rules: SplitRules) -> BoolArray:
    """Return which rows are in the test set."""
    if not 0 < rules.test_share < 1:
        raise ConfigError(f"The share of the test set is {rules.test_share}: it should be between 0 and 1.")
    groups = _Groups.of(table, by_thread=rules.method == "thread")
    is_chosen = np.zeros(len(groups.sizes), dtype=np.bool_)
    is_chosen[_newest(groups, rules.test_share) if rules.method == "time" else _stratified(groups, rules)] = (
        True
    )
    is_test: BoolArray = is_chosen[groups.of_row]
    return is_test


@dataclass(frozen=True, slots=True)
class _Groups:
    """Messages that stay together, in the order of their first messages."""

    table: SplitTable
    of_row: NDArray[np.int32]  # the group of each message
    rows: NDArray[np.int32]  # the messages of the first group, those of the second, and so on
    starts: IntArray  # of the groups in `rows`
    sizes: IntArray

    @classmethod
    def of(cls, table: SplitTable, by_thread: bool) -> _Groups:
        firsts = _with_threads(table) if by_thread else table.copies
        is_first = firsts == np.arange(len(firsts))
        of_row = (np.cumsum(is_first, dtype=np.int32) - 1)[firsts]
        sizes = np.bincount(of_row)
        rows = np.argsort(of_row, kind="stable").astype(np.int32)
        return cls(table, of_row, rows, np.cumsum(sizes) - sizes, sizes)

    def members(self, group: int) -> NDArray[np.int32]:
        start = self.starts[group]
        return self.rows[start : start + self.sizes[group]]

    def name(self, group: int) -> bytes:
        return min(map(self.table.name_of, self.members(group).tolist()))

    def categories(self) -> IntegerArray:
        """Return the most frequent category of each group; of several, the first by name."""
        found: IntegerArray = self.table.categories[self.rows[self.starts]]
        for group in np.flatnonzero(self.sizes > 1).tolist():
            found[group] = np.bincount(self.table.categories[self.members(group)]).argmax()
        return found

    def dates(self) -> FloatArray:
        """Return the date of each group's oldest message. A group with an undated one may be older: NaN."""
        oldest: FloatArray = np.minimum.reduceat(self.table.dates[self.rows], self.starts)
        return oldest


def _with_threads(table: SplitTable) -> NDArray[np.int32]:
    """Return the first message of those that are copies of each other or in one conversation."""
    parents = table.copies.astype(np.int32)
    forest = parents.data
    rows = np.argsort(table.threads, kind="stable")
    rows = rows[table.threads[rows] > 0]
    is_same = table.threads[rows[1:]] == table.threads[rows[:-1]]
    for one, other in zip(rows[:-1][is_same].tolist(), rows[1:][is_same].tolist(), strict=True):
        join(forest, one, other)
    return roots(parents)


def _stratified(groups: _Groups, rules: SplitRules) -> list[int]:
    """Take groups in an order given by the seed, until each category has its share."""
    num_groups = len(groups.sizes)
    keys = (_order(rules.seed, groups.name(group)) for group in range(num_groups))
    order = np.argsort(np.fromiter(keys, dtype=np.uint64, count=num_groups), kind="stable")
    categories = groups.categories()[order]
    by_category = order[np.argsort(categories, kind="stable")]
    chosen: list[int] = []
    for own in np.split(by_category, np.bincount(categories).cumsum()[:-1]):
        wanted = rules.test_share * int(groups.sizes[own].sum())
        num_chosen = 0
        for group, size in zip(own.data, groups.sizes[own].data, strict=True):
            if num_chosen + size / 2 <= wanted:  # nearer to the share with it than without
                chosen.append(group)
                num_chosen += size
    return chosen


def _newest(groups: _Groups, share: float) -> list[int]:
    """Take the newest groups. Those without a date are not in the test set."""
    wanted = share * len(groups.of_row)
    dates = groups.dates()
    newest_first = np.argsort(-dates, kind="stable")  # NaN comes last
    newest_first = newest_first[: np.count_nonzero(~np.isnan(dates))]
    chosen: list[int] = []
    num_chosen = 0
    for _, same_date in groupby(newest_first.data, key=lambda group: float(dates[group])):
        for group in sorted(same_date, key=groups.name):
            size = int(groups.sizes[group])
            if num_chosen + size / 2 > wanted:
                return chosen
            chosen.append(group)
            num_chosen += size
    return chosen


def _order(seed: int, name: bytes) -> int:
    content = seed.to_bytes(8, "little", signed=True) + name
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")

"""The test set of a collection of mail: at random, the newest, or whole conversations.

Copies and near-copies of a message are always on the same side, since a model that has seen one of them knows
the other. A split depends on the seed and on what the messages say, not on their order or their place.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from macbook_optimization.errors import ConfigError
from trm.arrays import BoolArray, IntArray
from trm.tasks.documents.duplicates import Fingerprint, find_duplicates, join, roots

Method = Literal["random", "time", "thread"]


@dataclass(frozen=True, slots=True)
class SplitRules:
    method: Method = "random"  # stratified by category; the newest messages; or whole threads at random
    test_share: float = 0.2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SplitItem:
    """What a split needs of a message."""

    key: str
    category: str
    fingerprint: Fingerprint
    date: float | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Messages that stay together."""

    name: bytes  # of its content
    members: list[int]
    category: str
    date: float | None  # of its oldest message


def choose_test(items: Sequence[SplitItem], rules: SplitRules) -> BoolArray:
    """Return which messages are in the test set."""
    if not 0 < rules.test_share < 1:
        raise ConfigError(f"The share of the test set is {rules.test_share}: it should be between 0 and 1.")
    groups = _groups(items, by_thread=rules.method == "thread")
    chosen = _newest(groups, rules.test_share) if rules.method == "time" else _stratified(groups, rules)
    is_test = np.zeros(len(items), dtype=np.bool_)
    is_test[chosen] = True
    return is_test


def _groups(items: Sequence[SplitItem], by_thread: bool) -> list[_Group]:
    parents = find_duplicates([item.fingerprint for item in items]).near.tolist()
    if by_thread:
        firsts: dict[str, int] = {}
        for number, item in enumerate(items):
            if item.thread:
                join(parents, firsts.setdefault(item.thread, number), number)
    return [_group(items, members) for members in _members(roots(parents))]


def _members(groups: IntArray) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for number, group in enumerate(groups.tolist()):
        found.setdefault(group, []).append(number)
    return list(found.values())


def _group(items: Sequence[SplitItem], members: list[int]) -> _Group:
    name = min(items[number].fingerprint.digest or items[number].key.encode() for number in members)
    categories = Counter(items[number].category for number in members)
    category = min(categories, key=lambda name: (-categories[name], name))
    dates = [date for number in members if (date := items[number].date) is not None]
    # A group with an undated message may be older than it seems.
    return _Group(name, members, category, min(dates) if len(dates) == len(members) else None)


def _stratified(groups: list[_Group], rules: SplitRules) -> list[int]:
    """Take groups in an order given by the seed, until each category has its share."""
    chosen: list[int] = []
    by_category: dict[str, list[_Group]] = {}
    for group in sorted(groups, key=lambda group: _order(rules.seed, group.name)):
        by_category.setdefault(group.category, []).append(group)
    for own in by_category.values():
        wanted = rules.test_share * sum(len(group.members) for group in own)
        num_chosen = 0
        for group in own:
            if num_chosen + len(group.members) / 2 <= wanted:  # nearer to the share with it than without
                chosen += group.members
                num_chosen += len(group.members)
    return chosen


def _newest(groups: list[_Group], share: float) -> list[int]:
    """Take the newest groups. Those without a date are not in the test set."""
    wanted = share * sum(len(group.members) for group in groups)
    dated = sorted(
        (group for group in groups if group.date is not None),
        key=lambda group: (-(group.date or 0.0), group.name),
    )
    chosen: list[int] = []
    for group in dated:
        if len(chosen) + len(group.members) / 2 > wanted:
            break
        chosen += group.members
    return chosen


def _order(seed: int, name: bytes) -> bytes:
    return hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + name, digest_size=8).digest()

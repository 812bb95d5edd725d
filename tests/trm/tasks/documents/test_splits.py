"""The test set shares nothing with the training set, and is the same every time."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError
from trm.tasks.documents.duplicates import Fingerprint, fingerprint
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.splits import SplitItem, SplitRules, choose_test


def item(number, category="a", date=None, thread="", content=None):
    text = f"message number{number if content is None else content}"
    return SplitItem(str(number), category, fingerprint(Mail("parsed", text=text)), date, thread)


def test_each_category_has_its_share():
    items = [item(number, "big" if number % 10 else "small") for number in range(1000)]
    is_test = choose_test(items, SplitRules(test_share=0.2))
    assert Counter(one.category for one, chosen in zip(items, is_test, strict=True) if chosen) == {
        "big": 180,
        "small": 20,
    }


def test_a_small_category_is_not_only_in_the_test_set():
    for size in range(1, 8):
        is_test = choose_test([item(number) for number in range(size)], SplitRules())
        assert is_test.sum() == (0, 0, 0, 1, 1, 1, 1, 1)[size]


METHODS = st.sampled_from(["random", "time", "thread"])
rows_of_copies = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=40
)


@given(rows_of_copies, METHODS, st.integers(0, 3))
def test_copies_and_threads_are_on_one_side(rows, method, seed):
    items = [
        item(number, category, float(content * 7 % 11), f"t{thread}", content)
        for number, (content, category, thread) in enumerate(rows)
    ]
    is_test = choose_test(items, SplitRules(method, 0.3, seed))
    sides = {}
    for one, chosen in zip(items, is_test.tolist(), strict=True):
        assert sides.setdefault(one.fingerprint.digest, chosen) == chosen
        if method == "thread":
            assert sides.setdefault(one.thread, chosen) == chosen


@given(st.permutations(range(24)), METHODS)
def test_order_and_place_of_messages_do_not_matter(order, method):
    items = [
        item(number, "ab"[number % 2], float(number), f"t{number // 3}", number // 2) for number in range(24)
    ]
    before = choose_test(items, SplitRules(method))
    moved = [replace(items[number], key=f"elsewhere/{number}") for number in order]
    assert choose_test(moved, SplitRules(method)).tolist() == before[list(order)].tolist()


def test_another_seed_is_another_split():
    items = [item(number) for number in range(100)]
    splits = {tuple(choose_test(items, SplitRules(seed=seed)).tolist()) for seed in range(5)}
    assert len(splits) == 5


def test_the_newest_messages_are_the_test_set():
    dates = random.Random(0).sample(range(100), 100)
    items = [item(number, date=float(date)) for number, date in enumerate(dates)]
    is_test = choose_test(items, SplitRules("time", 0.25))
    assert sorted(np.array(dates)[is_test]) == list(range(75, 100))


def test_a_copy_of_an_old_message_and_undated_messages_are_not_in_a_test_set_by_time():
    items = [item(number, date=float(number)) for number in range(10)]
    items += [item(10, date=99.0, content=0), item(11), item(12, date=98.0)]
    is_test = choose_test(items, SplitRules("time", 0.25))
    assert np.flatnonzero(is_test).tolist() == [8, 9, 12]


def test_messages_without_words_are_split_by_their_key():
    items = [SplitItem(str(number), "a", Fingerprint(b"", b"")) for number in range(100)]
    assert choose_test(items, SplitRules()).sum() == 20


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 2.0])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        choose_test([item(1)], SplitRules(test_share=share))

"""Copies and near-copies are found, in linear time."""

import random
import time

import numpy as np
import pytest

from trm.tasks.documents.duplicates import Fingerprint, find_duplicates, fingerprint
from trm.tasks.documents.mail import Mail

WORDS = [f"word{number}" for number in range(2000)]


def text_of(random_, length=200):
    return " ".join(random_.choices(WORDS, k=length))


def changed(random_, text, num_changes):
    found = text.split()
    for place in random_.sample(range(len(found)), num_changes):
        found[place] = "changed"
    return " ".join(found)


def prints(*texts):
    return [fingerprint(Mail("parsed", text=text)) for text in texts]


def sequences(text):
    found = text.split()
    return {tuple(found[place : place + 3]) for place in range(len(found) - 2)}


def test_the_same_words_are_an_exact_copy():
    groups = find_duplicates(prints("Buy now", "other", "BUY   now", ""))
    assert groups.exact.tolist() == [0, 1, 0, 3]
    assert (groups.num_exact_copies, groups.num_near_copies) == (1, 0)


def test_empty_messages_are_not_copies_of_each_other():
    assert find_duplicates(prints("", " ", "!")).num_exact_copies == 0


@pytest.mark.parametrize("seed", range(5))
def test_near_copies_are_found_and_others_are_not(seed):
    random_ = random.Random(seed)
    first, other = text_of(random_), text_of(random_)
    groups = find_duplicates(prints(first, other, changed(random_, first, 3), changed(random_, first, 60)))
    assert groups.near.tolist() == [0, 1, 0, 3]
    assert (groups.num_exact_copies, groups.num_near_copies) == (0, 1)


def test_the_share_of_equal_entries_estimates_the_share_in_common():
    random_ = random.Random(1)
    differences = []
    for num_changes in (0, 5, 20, 50, 100) * 6:
        first = text_of(random_)
        second = changed(random_, first, num_changes)
        one, other = (np.frombuffer(found.signature, "<u4") for found in prints(first, second))
        common = len(sequences(first) & sequences(second)) / len(sequences(first) | sequences(second))
        differences.append((one == other).mean() - common)
    assert abs(np.mean(differences)) < 0.02  # unbiased; one estimate has a standard error of at most 0.06
    assert np.abs(differences).max() < 0.2


def test_the_order_of_messages_does_not_change_the_groups():
    random_ = random.Random(2)
    texts = [text_of(random_, 40) for _ in range(20)]
    texts += [changed(random_, text, random_.randint(0, 3)) for text in texts * 3]
    found = prints(*texts)
    order = random_.sample(range(len(texts)), len(texts))
    before = find_duplicates(found).near
    after = find_duplicates([found[number] for number in order]).near
    together = {(one, other) for one in range(80) for other in range(80) if before[one] == before[other]}
    place = {number: position for position, number in enumerate(order)}
    assert together == {
        (one, other) for one in range(80) for other in range(80) if after[place[one]] == after[place[other]]
    }


def test_a_fingerprint_is_the_same_on_every_machine():
    [found] = prints("one two three four five six seven eight nine")
    assert found.digest.hex() == "f70ba8839b99c4e9cbd435f26eaf828f"
    assert found.signature[:8].hex() == "e85d211adc417536"
    assert len(found.signature) == 256


def test_many_copies_of_one_message_take_linear_time():
    random_ = random.Random(3)
    first = text_of(random_, 60)
    [same] = prints(first)
    found = [Fingerprint(number.to_bytes(16, "big"), same.signature) for number in range(20_000)]
    started = time.process_time()
    assert find_duplicates(found).num_near_copies == 19_999
    assert time.process_time() - started < 2

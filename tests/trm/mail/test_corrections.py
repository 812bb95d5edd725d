"""Corrections are learned in milliseconds, keep other answers, and can be taken back."""

import shutil

import numpy as np
import pytest
from letters import letter

from trm.mail.deciding import open_classifier
from trm.tasks.documents.mailboxes import Message


def messages(category, numbers, seed=7):
    return [Message(f"{category}{number}", letter(category, number, seed)) for number in numbers]


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def categories(classifier, given):
    return [decision.category for _, decision in classifier.decide(given)]


@pytest.mark.slow
def test_a_correction_is_learned_and_forgotten(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)
    (given,) = messages("travel", [1])
    with open_classifier(run) as classifier:
        assert categories(classifier, [given]) == ["travel"]
        assert classifier.learn([given], "spam") == (1, 0)
    with open_classifier(run) as classifier:
        ((_, decision),) = classifier.decide([given])
        assert decision.category == "spam"
        assert decision.confidence > 0.9
        assert classifier.learn([given], "spam") == (0, 1)  # right already
        assert classifier.forget([classifier.corrections[0].key]) == 1
    with open_classifier(run) as classifier:
        assert categories(classifier, [given]) == ["travel"]


@pytest.mark.slow
def test_corrections_fix_what_they_name_and_keep_the_rest(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)
    wrong = messages("work", range(20), seed=8)
    others = [each for category in ("travel", "spam") for each in messages(category, range(60), seed=9)]
    with open_classifier(run) as classifier:
        before = categories(classifier, others)
        classifier.learn(wrong, "travel")
    with open_classifier(run) as classifier:
        fixed = np.mean([category == "travel" for category in categories(classifier, wrong)])
        kept = np.mean(
            [now == then for now, then in zip(categories(classifier, others), before, strict=True)]
        )
    assert fixed == 1.0
    assert kept >= 0.99


@pytest.mark.slow
def test_a_message_that_is_corrected_again_has_its_last_category(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)
    (given,) = messages("travel", [2])
    for category in ("spam", "work"):
        with open_classifier(run) as classifier:
            classifier.learn([given], category)
    with open_classifier(run) as classifier:
        assert len(classifier.corrections) == 1
        assert categories(classifier, [given]) == ["work"]


@pytest.mark.slow
def test_corrections_of_two_processes_are_both_kept(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)
    one, other = messages("travel", [1, 2])
    with open_classifier(run) as first, open_classifier(run) as second:
        first.learn([one], "spam")
        second.learn([other], "spam")
    with open_classifier(run) as classifier:
        assert len(classifier.corrections) == 2
        assert categories(classifier, [one, other]) == ["spam", "spam"]

"""Corrections are learned in milliseconds, keep other answers, and can be taken back."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from letters import letter

from trm.cli import cli
from trm.mail.corrections import key_of
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


def test_a_message_has_one_key_in_an_mbox_a_maildir_and_a_file():
    alone = b"Subject: s\n\nOnce\nFrom here on\n"
    separator = b"From a Mon Jan  1 00:00:00 2024\n"
    in_mbox = separator + b"Subject: s\n\nOnce\n>From here on\n\n"
    assert (
        len({key_of(raw) for raw in (alone, in_mbox, separator + alone, alone.replace(b"\n", b"\r\n"))}) == 1
    )
    assert key_of(alone) != key_of(alone.replace(b"Once", b"Twice"))


@pytest.mark.slow
def test_a_correction_of_a_file_is_taken_back_through_its_directory_and_only_once(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)
    directory = tmp_path / "one"
    directory.mkdir()
    file = directory / "message"
    file.write_bytes(b"From a Mon Jan  1 00:00:00 2024\n" + letter("travel", 1, 5))

    def email(*arguments):
        return CliRunner().invoke(cli, ["email", *map(str, arguments)])

    assert email("learn", run, "spam", file).exit_code == 0
    assert "Forgot 1 correction." in email("forget", run, directory).output
    again = email("forget", run, directory)
    assert "There is no correction of these messages" in str(again.exception)


def test_corrections_are_listed(trained, tmp_path):
    run = copy_of(trained[0], tmp_path)

    def listed(*words):
        command = ["email", "corrections", str(run), *map(str, words)]
        return CliRunner().invoke(cli, command, catch_exceptions=False).stdout

    assert listed() == "There are no corrections.\n"
    path, other = tmp_path / "a.eml", tmp_path / "b.eml"
    path.write_bytes(letter("travel", 1, 7))
    other.write_bytes(letter("travel", 2, 7))
    with open_classifier(run) as classifier:
        classifier.learn([Message(str(path), path.read_bytes())], "spam")
    key = key_of(path.read_bytes())
    assert listed().split() == [key[:12], "spam", "instead", "of", "travel"]
    (found,) = json.loads(listed("--json"))
    assert (found["key"], found["category"], found["before"], found["path"]) == (key, "spam", "travel", None)
    (found,) = json.loads(listed(path, other, "--json"))
    assert found["path"] == str(path)

"""Turkish mail is classified, whatever its charset and however its i is written."""

import pytest
from tiny import Recorder
from turkish_letters import CHARSETS, LETTERS, NUM_HELD_OUT, letter

from trm.mail.deciding import open_classifier
from trm.mail.training import MailOptions, train_mail
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.splits import SplitRules


@pytest.fixture(scope="module")
def turkish(tmp_path_factory):
    """Return the run of a model of 27 messages in three charsets."""
    directory = tmp_path_factory.mktemp("turkish")
    for category, letters in LETTERS.items():
        (directory / "mail" / category).mkdir(parents=True)
        for number, (subject, text) in enumerate(letters[:-NUM_HELD_OUT]):
            raw = letter(subject, text, CHARSETS[number % len(CHARSETS)])
            (directory / "mail" / category / f"{number}.eml").write_bytes(raw)
    options = MailOptions(held_out=SplitRules("random", 0.0))
    train_mail([directory / "mail"], directory / "run", options, Recorder())
    return directory / "run"


@pytest.fixture(scope="module")
def decided(turkish):
    """Return the right category and the decision of each message that was held out, for each charset."""
    held_out = [(name, each) for name, letters in LETTERS.items() for each in letters[-NUM_HELD_OUT:]]
    with open_classifier(turkish) as classifier:
        return {
            charset: [
                (read.message.key, decision)
                for read, decision in classifier.decide(
                    Message(category, letter(*each, charset)) for category, each in held_out
                )
            ]
            for charset in CHARSETS
        }


@pytest.mark.parametrize("charset", CHARSETS)
def test_held_out_turkish_messages_are_classified_right(decided, charset):
    found = [(wanted, decision.category) for wanted, decision in decided[charset]]
    assert found == [(wanted, wanted) for wanted in LETTERS for _ in range(NUM_HELD_OUT)]


def test_the_charset_of_a_message_changes_nothing(decided):
    ours, *others = decided.values()
    assert others == [ours, ours]


def test_upper_and_lower_case_are_decided_alike(turkish):
    text = "Isparta otobüsü için biniş kartınız hazır, ışıklı ve indirimli."
    capitals = text.replace("i", "İ").replace("ı", "I").upper()
    given = [Message("", letter(each, each, charset)) for each in (text, capitals) for charset in CHARSETS]
    with open_classifier(turkish) as classifier:
        found = [decision for _, decision in classifier.decide(given)]
    assert found == [found[0]] * 6

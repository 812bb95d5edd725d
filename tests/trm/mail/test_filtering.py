"""The filter adds headers and changes nothing else."""

import re
import tarfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.mail.deciding import open_classifier
from trm.mail.filtering import with_headers
from trm.mail.model import Decision
from trm.tasks.documents.mailboxes import Message

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "spamassassin.tar.xz"
NUM_REAL_MESSAGES = 1000
ADDED = re.compile(
    rb"X-TRM-Category: (spam|travel|work)(\r?\n)X-TRM-Confidence: [01]\.\d{3}\2X-TRM-Unsure: (yes|no)\2"
)
DECISION = Decision("work", 0.97, False, {"work": 0.97, "spam": 0.03})


@given(st.binary(max_size=400))
def test_every_byte_of_the_message_stays(raw):
    filtered = with_headers(raw, DECISION)
    assert filtered.endswith(raw) or (raw.startswith(b"From ") and filtered.startswith(b"From "))
    if raw.startswith(b"From "):
        line, newline, rest = raw.partition(b"\n")
        assert filtered.startswith(line + newline)
        assert filtered.endswith(rest)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_the_headers_come_first_with_the_line_ending_of_the_message(ending):
    raw = ending.join(
        [b"From: a@example.org", b"X-TRM-Category: forged", b"Subject: hello", b"", b"text", b""]
    )
    parsed = message_from_bytes(with_headers(raw, DECISION))
    assert parsed.get_all("X-TRM-Category") == ["work", "forged"]
    assert parsed["X-TRM-Confidence"] == "0.970"
    assert parsed["X-TRM-Unsure"] == "no"
    assert with_headers(raw, DECISION).count(b"\r\n") == (
        len(raw.split(b"\r\n")) + 2 if ending == b"\r\n" else 0
    )


def test_the_separator_of_an_mbox_stays_in_front():
    raw = b"From someone Mon Jan  1 00:00:00 2024\nSubject: hello\n\ntext\n"
    assert with_headers(raw, DECISION).startswith(
        b"From someone Mon Jan  1 00:00:00 2024\nX-TRM-Category: work\n"
    )


def test_names_of_categories_cannot_add_headers():
    evil = Decision("work\r\nBcc: everyone@example.org", 0.9, True, {})
    parsed = message_from_bytes(with_headers(b"Subject: hello\n\ntext\n", evil))
    assert parsed["Bcc"] is None
    turkish = Decision("alışveriş", 0.9, True, {})
    line = with_headers(b"Subject: hello\n\n", turkish).split(b"\n")[0]
    assert line.isascii()


def test_a_message_that_could_not_be_read_is_unknown():
    assert message_from_bytes(with_headers(b"\n", None))["X-TRM-Category"] == "unknown"


def real_messages():
    """Return messages of every folder of a public corpus."""
    with tarfile.open(SHARED) as archive:
        files = [member for member in archive if member.isfile() and member.size]
        chosen = files[:: len(files) // NUM_REAL_MESSAGES][:NUM_REAL_MESSAGES]
        return [archive.extractfile(member).read() for member in chosen]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the SpamAssassin corpus in ../shared/data")
def test_every_byte_of_a_thousand_real_messages_stays(trained):
    raws = real_messages()
    assert len(set(raws)) > 0.9 * NUM_REAL_MESSAGES
    with open_classifier(trained[0]) as classifier:
        decided = list(classifier.decide(Message(str(number), raw) for number, raw in enumerate(raws)))
    assert len(decided) == NUM_REAL_MESSAGES
    num_after_a_separator = 0
    for raw, (_, decision) in zip(raws, decided, strict=True):
        filtered = with_headers(raw, decision)
        start = raw.index(b"\n") + 1 if raw.startswith(b"From ") else 0
        added = ADDED.match(filtered, start)
        assert filtered[:start] == raw[:start]
        assert filtered[added.end() :] == raw[start:]
        num_after_a_separator += bool(start)
        headers = list(message_from_bytes(filtered).raw_items())
        assert [name for name, _ in headers[:3]] == ["X-TRM-Category", "X-TRM-Confidence", "X-TRM-Unsure"]
        assert headers[3:] == list(message_from_bytes(raw).raw_items())
    assert 0 < num_after_a_separator < NUM_REAL_MESSAGES

"""What a classifier gets of a message."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.tasks.documents.mail import MAX_LINKS, MAX_TEXT_CHARACTERS, parse_mail


def mail(headers="", body=""):
    return parse_mail(f"{headers}\n\n{body}".encode())


@given(st.binary(max_size=2000))
def test_any_bytes_have_a_verdict(raw):
    found = parse_mail(raw)
    assert found.verdict in ("parsed", "truncated", "skipped")
    assert bool(found.reason) == (found.verdict != "parsed")


@given(st.sampled_from(["Date", "From", "X-Gmail-Labels", "References", "Content-Type"]), st.text())
def test_any_value_of_a_header_is_accepted(name, value):
    assert parse_mail(f"{name}: {value}\n\nx".encode("utf-8", "replace")).verdict != "skipped"


@pytest.mark.parametrize("raw", [b"", b"\n\r\n ", b" "])
def test_an_empty_message_is_skipped(raw):
    assert (parse_mail(raw).verdict, parse_mail(raw).reason) == ("skipped", "empty")


def test_a_message_without_text_is_empty():
    assert mail("From: a@b.c").is_empty
    assert not mail("Subject: x").is_empty


def test_sender_date_thread_and_labels_are_read():
    found = mail(
        'From: "A, <B>" <Ann@Example.ORG>\nDate: Thu, 01 Jan 1970 01:00:05 +0100\nMessage-ID: <3@x>\n'
        'References: <1@x> <2@x>\nX-Gmail-Labels: Inbox,"Work, urgent",=?utf-8?q?=C4=B0=C5=9F?='
    )
    assert (found.sender, found.date, found.message_id, found.thread) == (
        "ann@example.org",
        5.0,
        "3@x",
        "1@x",
    )
    assert found.labels == ("Inbox", "Work, urgent", "İş")


def test_the_thread_of_a_reply_without_references_is_what_it_replies_to():
    assert mail("Message-ID: <3@x>\nIn-Reply-To: <1@x>").thread == "1@x"
    assert mail("Message-ID: <3@x>\nReferences: none\nIn-Reply-To: <1@x>").thread == "1@x"
    assert mail("Message-ID: <3@x>").thread == "3@x"


@pytest.mark.parametrize("value", ["", "soon", "99 Foo 99999 99:99:99", "1" * 5000])
def test_an_impossible_date_is_none(value):
    assert mail(f"Date: {value}").date is None


def test_hypertext_is_used_only_without_plain_text():
    parts = "--b\nContent-Type: text/plain\n\n{}\n--b\nContent-Type: text/html\n\n<p>rich <a href='http://X.org/a'>\n"
    headers = "Content-Type: multipart/alternative; boundary=b"
    assert mail(headers, parts.format("plain")).text == "plain"
    found = mail(headers, parts.format(""))
    assert (found.text, found.link_domains) == ("rich", ("x.org",))


def test_attachments_are_named_by_extension_or_type():
    found = mail(
        "Content-Type: multipart/mixed; boundary=b",
        "--b\nContent-Type: application/pdf; name=a.PDF\n\nx\n"
        "--b\nContent-Type: image/png\n\nx\n"
        "--b\nContent-Type: text/plain\nContent-Disposition: attachment; filename*=utf-8''n.txt\n\nx\n--b--",
    )
    assert found.attachments == ("pdf", "image/png", "txt")
    assert found.text == ""


def test_headers_that_classify_the_message_are_not_features():
    found = mail("X-Spam-Status: Yes\nX-Gmail-Labels: Spam\nX-TRM-Category: a\nStatus: RO\nX-Mailer: Foo")
    assert [word for word in found.header_words if word.startswith("has:")] == ["has:x-mailer"]


def test_eight_bit_headers_are_utf_8_or_turkish():
    assert parse_mail("Subject: ığdır".encode()).subject == "ığdır"
    assert parse_mail("Subject: ığdır şehri".encode("windows-1254")).subject == "ığdır şehri"


TURKISH_NAMES = "From: İSTANBUL IŞIK <a@b.c>\nOrganization: ÇIĞIR VAKFI İzmir"


@pytest.mark.parametrize("charset", ["windows-1254", "iso-8859-9", "utf-8"])
def test_turkish_names_in_headers_are_lowered_by_their_own_rules(charset):
    found = parse_mail(TURKISH_NAMES.encode(charset) + b"\n\n").header_words
    assert [word for word in found if word.startswith(("from:", "organization:"))] == [
        *("from:b.c", "from:istanbul", "from:ışık"),
        *("organization:çığır", "organization:vakfı", "organization:izmir"),
    ]


def test_english_names_in_headers_are_lowered_by_their_own_rules():
    found = mail("From: LIMIT INC. <info@IBM.COM>\nX-Mailer: MICROSOFT Outlook").header_words
    assert [word for word in found if not word.startswith(("has:", "part:"))] == [
        *("from:ibm.com", "from:limit", "from:inc.", "x-mailer:microsoft", "x-mailer:outlook"),
    ]


def test_turkish_domains_have_no_combining_dots():
    found = mail("From: Ali <ALİ@İZMİR.example>", "https://İZMİR.example/a")
    assert (found.sender, found.link_domains) == ("ali@izmir.example", ("izmir.example",))
    assert "from:izmir.example" in found.header_words


def test_text_and_links_are_bounded():
    part = "--b\n\n" + "x " * 120_000 + "\n"
    found = mail("Content-Type: multipart/mixed; boundary=b", part * 9)
    assert (found.verdict, found.reason, len(found.text)) == ("truncated", "text", MAX_TEXT_CHARACTERS)
    links = " ".join(f"http://{number}.org/" for number in range(MAX_LINKS + 50))
    assert len(mail("Subject: s", links).link_domains) == MAX_LINKS


def test_floods_of_encoded_words_and_addresses_are_read_quickly():
    flood = b"=?utf-8?q?a?= " * 20_000
    started = time.process_time()
    headers = b"".join(name + b": " + flood + b"\n" for name in (b"Subject", b"From", b"X-Mailer", b"To"))
    parse_mail(headers + b"\n")
    parse_mail(b"From: " + b"a" * 250_000 + b"@\nTo: " + b"((((" * 1000 + b"\n\n")
    assert time.process_time() - started < 0.5

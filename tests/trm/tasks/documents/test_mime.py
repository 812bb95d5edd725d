"""The parser gives what the standard library gives where that one is safe, and stays within its limits."""

import email
import email.header
import email.message
import email.mime.message
import email.mime.multipart
import email.mime.text
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.tasks.documents import mime
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.mime import decode_words, first, parse_headers, parse_structure

charsets = st.sampled_from(["utf-8", "iso-8859-9", "windows-1254", "iso-8859-1", "koi8-r", "shift_jis"])
letters = {
    "utf-8": "añığ≠漢 z",
    "iso-8859-9": "ağışİ z",
    "windows-1254": "ağışİ€ z",
    "iso-8859-1": "añß z",
    "koi8-r": "жщы z",
    "shift_jis": "漢字 z",
}


def text_part(text, charset="utf-8", kind="plain"):
    return email.mime.text.MIMEText(text, kind, charset)


def multipart(*parts, kind="mixed"):
    message = email.mime.multipart.MIMEMultipart(kind)
    for part in parts:
        message.attach(part)
    return message


def plain_texts(raw):
    """Return the plain texts as the standard library reads them."""
    parts = [part for part in email.message_from_bytes(raw).walk() if not part.is_multipart()]
    return [
        part.get_payload(decode=True).decode(part.get_content_charset() or "ascii")
        for part in parts
        if part.get_content_type() == "text/plain"
    ]


MESSAGES = {
    "plain": lambda: text_part("Hello"),
    "Turkish, UTF-8": lambda: text_part("Işık ılık, İğde şeker", "utf-8"),
    "Turkish, windows-1254": lambda: text_part("Işık ılık, İğde şeker €", "windows-1254"),
    "Turkish, iso-8859-9": lambda: text_part("Işık ılık, İğde şeker", "iso-8859-9"),
    "two parts": lambda: multipart(text_part("one"), text_part("two")),
    "nested": lambda: multipart(
        text_part("a"), multipart(text_part("b"), multipart(text_part("c")), text_part("d"))
    ),
    "forwarded": lambda: multipart(text_part("see"), email.mime.message.MIMEMessage(text_part("inner"))),
    "digest": lambda: multipart(
        email.mime.message.MIMEMessage(text_part("first")),
        email.mime.message.MIMEMessage(multipart(text_part("second"), text_part("third"))),
        kind="digest",
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_texts_equal_those_of_the_standard_library(kind):
    message = MESSAGES[kind]()
    message["Subject"] = "x"
    raw = message.as_bytes()
    parts = parse_structure(raw).parts
    ours = [part.text()[0] for part in parts if part.content_type == "text/plain"]
    assert [text.strip() for text in ours] == [text.strip() for text in plain_texts(raw)]


def test_a_digest_without_types_holds_messages():
    parts = b"--b\n\nSubject: a\n\none\n--b\n\nSubject: b\n\ntwo\n--b--\n"
    raw = b"Content-Type: multipart/digest; boundary=b\n\n" + parts
    assert [part.text()[0] for part in parse_structure(raw).parts] == ["one", "two"]
    assert plain_texts(raw) == ["one", "two"]


def test_line_ends_of_all_systems_are_read():
    for end in (b"\n", b"\r\n", b"\r"):
        raw = b"Content-Type: multipart/mixed; boundary=b\nSubject: s\n\n--b\n\none\n--b--\n".replace(
            b"\n", end
        )
        assert parse_mail(raw).text == "one"


def test_a_longer_boundary_does_not_delimit():
    raw = b"Content-Type: multipart/mixed; boundary=b\n\n--b\n\none\n--bc\n--b-\n--b\n\ntwo\n--b--\n"
    assert [part.text()[0] for part in parse_structure(raw).parts] == ["one\n--bc\n--b-", "two"]


def test_a_multipart_without_a_usable_boundary_is_read_as_text():
    assert parse_mail(b"Content-Type: multipart/mixed\nSubject: s\n\nhello").text == "hello"


def test_parameters_of_rfc_2231_are_read():
    raw = (
        b"Content-Type: multipart/mixed; boundary*=us-ascii''b\n\n"
        b"--b\nContent-Type: text/plain; charset*=us-ascii'en'iso-8859-9\n\n\xfe\xfd\n--b--\n"
    )
    assert parse_mail(raw).text == "şı"


def test_the_separator_of_an_mbox_is_not_a_header():
    inner = b"From a@b Mon Jan 1 00:00:00 2024\nSubject: in\n\ninner"
    raw = b"From x Mon Jan 1 00:00:00 2024\nContent-Type: message/rfc822\nSubject: out\n\n" + inner
    mail = parse_mail(raw)
    assert (mail.subject, mail.text) == ("out", "inner")


names = st.from_regex(r"X-[A-Z][a-z]{0,8}", fullmatch=True)
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30).filter(
    lambda text: "=?" not in text
)


@pytest.mark.slow
@given(st.lists(st.tuples(names, st.lists(values, min_size=1, max_size=4)), max_size=8))
def test_folded_headers_equal_those_of_the_standard_library(fields):
    raw = "".join(f"{name}: " + "\n ".join(folded) + "\n" for name, folded in fields).encode() + b"\nbody"
    block = parse_headers(raw, 0, len(raw))
    reference = email.message_from_bytes(raw)
    assert raw[block.body_start :] == b"body"
    for name, _ in fields:
        assert [value.split() for value in block.headers[name.lower()]] == [
            value.split() for value in reference.get_all(name)
        ]


@given(st.data(), charsets)
def test_an_encoded_header_is_decoded_as_it_was_encoded(data, charset):
    text = data.draw(st.text(letters[charset], min_size=1, max_size=120))
    encoded = email.header.Header(text, charset, maxlinelen=60).encode()
    assert decode_words(encoded.replace("\n", "")) == text
    assert (
        "".join(
            part.decode(encoding or "ascii") if isinstance(part, bytes) else part
            for part, encoding in email.header.decode_header(encoded)
        )
        == text
    )


@given(
    st.lists(
        st.sampled_from(["=?utf-8?q?=C5=9F?=", "=?iso-8859-9?b?/g==?=", " ", "a", "=?x", "?="]), max_size=12
    )
)
def test_mixtures_of_words_equal_those_of_the_standard_library(pieces):
    text = "".join(pieces)
    reference = "".join(
        part.decode(encoding or "utf-8") if isinstance(part, bytes) else part
        for part, encoding in email.header.decode_header(text)
    )
    assert decode_words(text).split() == reference.split()


def test_a_character_may_be_split_between_two_encoded_words():
    assert decode_words("=?utf-8?b?xQ==?= =?utf-8?b?nw==?=") == "ş"
    assert decode_words("=?utf-8?q?a?= b =?utf-8?q?c?=") == "a b c"
    assert decode_words("=?utf-8?q?a?= =?iso-8859-9?q?=FE?= =?UTF-8*tr?q?c?=") == "aşc"


@given(st.binary(max_size=3000))
def test_any_bytes_have_a_structure(raw):
    structure = parse_structure(raw)
    assert len(structure.parts) <= mime.MAX_PARTS
    for part in structure.parts:
        part.text()


FRAGMENTS = st.sampled_from([
    b"Content-Type: multipart/mixed; boundary=b\n", b"Content-Type: message/rfc822\n", b"\n", b"--b\n",
    b"--b--\n", b"Content-Transfer-Encoding: base64\n", b"Content-Type: text/html; charset=utf-16\n", b"QQ=",
    b"=?utf-8?b?", b"Subject: ", b"\x00", b"\xff\xfe", b"From x\n", b" folded\n", b"<script>", b"&#x110000;",
    b"Date: 99 Xxx 9999\n",
])  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=60))
def test_any_order_of_fragments_has_a_verdict(fragments):
    assert parse_mail(b"".join(fragments)).verdict in ("parsed", "truncated", "skipped")


def test_headers_beyond_the_number_of_lines_are_cut_and_the_body_is_kept():
    raw = b"Subject: s\n" + b"X: y\n" * mime.MAX_HEADER_LINES + b"\nbody"
    mail = parse_mail(raw)
    assert (mail.verdict, mail.reason, mail.subject, mail.text) == ("truncated", "headers", "s", "body")


def test_headers_beyond_the_number_of_bytes_are_cut_and_the_body_is_kept():
    raw = b"Subject: s\nX: " + b"y" * mime.MAX_HEADER_BYTES + b"\n\nbody"
    mail = parse_mail(raw)
    assert (mail.verdict, mail.reason, mail.subject, mail.text) == ("truncated", "headers", "s", "body")


def test_the_value_of_a_header_is_bounded():
    raw = b"Subject: " + b"y" * 3 * mime.MAX_VALUE_CHARACTERS + b"\n\nbody"
    structure = parse_structure(raw)
    assert len(first(structure.headers, "subject")) == mime.MAX_VALUE_CHARACTERS
    assert structure.limits == ["headers"]


def nested(depth):
    start = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(depth))
    return start + b"Content-Type: text/plain\n\ndeep"


def test_parts_beyond_the_depth_are_left_out():
    assert parse_mail(nested(mime.MAX_DEPTH)).text == "deep"
    mail = parse_mail(b"Subject: s\n" + nested(mime.MAX_DEPTH + 1))
    assert (mail.verdict, mail.reason, mail.text, mail.subject) == ("truncated", "depth", "", "s")


def test_parts_beyond_their_number_are_left_out():
    raw = b"Content-Type: multipart/mixed; boundary=b\n\n" + b"--b\n\nx\n" * (mime.MAX_PARTS + 1)
    structure = parse_structure(raw)
    assert len(structure.parts) == mime.MAX_PARTS
    assert structure.limits == ["parts"]


def test_the_text_of_a_part_is_bounded():
    mail = parse_mail(b"Subject: s\n\n" + b"x" * (mime.MAX_TEXT_BYTES + 1))
    assert (mail.verdict, mail.reason, len(mail.text)) == ("truncated", "text", mime.MAX_TEXT_BYTES)


def test_a_message_beyond_the_number_of_bytes_is_skipped():
    mail = parse_mail(b"x" * (mime.MAX_MESSAGE_BYTES + 1))
    assert (mail.verdict, mail.reason) == ("skipped", "larger than 25 MiB")


M = b"Content-Type: multipart/mixed; boundary=b\n\n"
INNER = b"--b\nContent-Type: multipart/mixed; boundary=c\n\n"
SLOW_ELSEWHERE = {  # each of these took from 2 to 22 s at 25 MB
    "chains of messages": lambda: (
        M + (INNER + (b"--c\n" + b"Content-Type: message/rfc822\n\n" * 19) * 199) * 20
    ),
    "headers in parts": lambda: (
        M + (b"--b\n" + (b"Content-Type: message/rfc822\n" + b"a:\n" * 990 + b"\n") * 19) * 40
    ),
    "hypertext in parts": lambda: M + (b"--b\nContent-Type: text/html\n\n" + b"<a>" * 40000 + b"\n") * 40,
    "lines that begin as a delimiter": lambda: M * 20 + b"--bx\n" * 600_000,
    "a delimiter without lines": lambda: M + b"--b" * 1_000_000,
    "nested searches": lambda: nested(20) + b"\n" * 3_000_000,
    "form feeds": lambda: b"Content-Type: text/html\n\n" + b"\f" * 120_000,
    "less-than signs": lambda: b"Content-Type: text/html\n\n" + b"<" * 120_000 + b">",
}


@pytest.mark.parametrize("kind", SLOW_ELSEWHERE)
def test_a_message_made_to_be_slow_is_parsed_quickly(kind):
    raw = SLOW_ELSEWHERE[kind]()
    started = time.process_time()
    assert parse_mail(raw).verdict in ("parsed", "truncated")
    assert time.process_time() - started < 1.0

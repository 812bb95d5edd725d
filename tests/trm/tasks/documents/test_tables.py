"""Rows of CSV, JSON and JSON Lines are messages."""

import csv
import io
import json

import pytest

from macbook_optimization.errors import DataError
from trm.tasks.documents import tables
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.tables import read_csv, read_json, read_jsonl


def mails(rows):
    return [(parse_mail(row.raw), row.labels) for row in rows]


def from_csv(text, encoding="utf-8"):
    return mails(read_csv(io.BytesIO(text.encode(encoding)), "x.csv"))


def from_jsonl(*objects):
    lines = "".join(json.dumps(value) + "\n" for value in objects)
    return list(read_jsonl(io.BytesIO(lines.encode()), "x.jsonl"))


def test_a_row_has_subject_body_sender_date_and_category():
    header = "Subject,Body,Sender,Category,Date\n"
    [(mail, labels)] = from_csv(
        header + '"Hi, you","two\nlines",a@b.c,work,"Thu, 01 Jan 1970 00:00:09 +0000"\n'
    )
    assert (mail.subject, mail.text, mail.sender, mail.date) == ("Hi, you", "two\nlines", "a@b.c", 9.0)
    assert labels == ("work",)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_other_names_and_delimiters_are_understood(delimiter):
    text = "label;from;message;title\nspam;x@y.z;hello;hey\n".replace(";", delimiter)
    [(mail, labels)] = from_csv(text)
    assert (mail.subject, mail.text, mail.sender, labels) == ("hey", "hello", "x@y.z", ("spam",))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1254"])
def test_turkish_tables_are_read(encoding):
    [(mail, labels)] = from_csv("Konu;Metin;Kategori\nÇağrı;Işık ılık;İş\n", encoding)
    assert (mail.subject, mail.text, labels) == ("Çağrı", "Işık ılık", ("İş",))


def test_the_first_synonym_is_taken():
    [(mail, _)] = from_csv("id,message,body\n1,no,yes\n")
    assert mail.text == "yes"


@pytest.mark.parametrize("header", ["body,body,note", "Body, body ,note", "body,label,LABEL"])
def test_a_header_with_the_same_column_twice_is_refused(header):
    with pytest.raises(DataError, match="the header has 2 columns named") as caught:
        from_csv(f"{header}\n1,2,3\n")
    assert "rename" in caught.value.hint
    assert len(from_csv("body,note,note\n1,2,3\n")) == 1


def test_a_missing_text_names_the_columns_that_are_there():
    with pytest.raises(DataError, match=r"neither a subject nor a body\. Its columns: id, note") as caught:
        from_csv("id,note\n1,2\n")
    assert "text" in caught.value.hint
    with pytest.raises(DataError, match="Its columns: a"):
        from_jsonl({"a": 1})


def test_a_field_longer_than_the_csv_module_allows_is_read():
    [(mail, _)] = from_csv("body,label\n" + "x" * 200_000 + ",a\n")
    assert len(mail.text) == 200_000
    assert csv.field_size_limit() == 131_072  # as before


def test_a_field_without_an_end_is_an_error(monkeypatch):
    monkeypatch.setattr(tables, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(DataError, match=r"x\.csv, line \d+: field larger"):
        from_csv('body,label\n"never closed\n' + "x\n" * 2000)
    with pytest.raises(DataError, match="line 2 is larger than"):
        from_csv("body,label\n" + "x" * 2000)


def test_short_rows_and_empty_lines_do_no_harm():
    found = from_csv("subject,body,label\nonly\n\na,b,c,d\n")
    assert [(mail.subject, mail.text, labels) for mail, labels in found] == [
        ("only", "", ()),
        ("a", "b", ("c",)),
    ]


def test_a_subject_cannot_add_headers():
    [row] = from_jsonl({"subject": "x\nFrom: evil@x.y\n\nbody", "text": "t", "label": "a\nb"})
    mail = parse_mail(row.raw)
    assert (mail.subject, mail.sender, mail.text) == ("x From: evil@x.y body", "", "t")
    assert row.labels == ("a b",)


def test_a_column_of_whole_messages_is_parsed_as_such():
    raw = "Message-ID: <1@x>\nDate: Thu, 01 Jan 1970 00:00:09 +0000\nSubject: whole\n\nbody"
    [row] = from_jsonl({"file": "a", "message": raw})
    assert (parse_mail(row.raw).subject, parse_mail(row.raw).text) == ("whole", "body")


def test_hypertext_in_a_column_is_recognised():
    [row] = from_jsonl({"subject": "s", "body": "<html><body><p>one<p>two"})
    assert parse_mail(row.raw).text == "one\ntwo"


def test_a_category_may_be_a_list_or_a_number():
    rows = from_jsonl(
        {"text": "a", "label": ["x", "y"]}, {"text": "a", "label": 1}, {"text": "a", "label": None}
    )
    assert [row.labels for row in rows] == [("x", "y"), ("1",), ()]


def test_a_bad_line_of_json_lines_costs_only_itself():
    content = b'{"text": "a"}\nnot json\n[1]\n{"other": 1}\n\n' + b"[" * 50_000 + b'\n{"text": "\\ud800"}'
    rows = list(read_jsonl(io.BytesIO(content), "x"))
    assert [row.problem for row in rows] == [
        "",
        "not a line of JSON",
        "not a JSON object",
        "has neither subject nor body",
        "not a line of JSON",
        "",
    ]
    assert rows[-1].end_offset == len(content)


def test_json_lines_continue_at_an_offset():
    rows = from_jsonl({"text": "a"}, {"text": "b"})
    stream = io.BytesIO(b'{"text": "a"}\n{"text": "b"}\n')
    stream.seek(rows[0].end_offset)
    assert list(read_jsonl(stream, "x", rows[0].end_offset)) == rows[1:]


def test_a_line_beyond_the_limit_is_skipped(monkeypatch):
    monkeypatch.setattr(tables, "MAX_MESSAGE_BYTES", 100)
    content = b'{"text": "' + b"x" * 3_000_000 + b'"}\n{"text": "b"}\n'
    rows = list(read_jsonl(io.BytesIO(content), "x"))
    assert [row.problem for row in rows] == ["larger than 25 MiB", ""]


@pytest.mark.parametrize(
    "content", ['[{"text": "a"}, {"text": "b"}]', '{"messages": [{"text": "a"}, {"text": "b"}]}']
)
def test_json_is_a_list_or_an_object_with_one(content):
    assert [mail.text for mail, _ in mails(read_json(io.BytesIO(content.encode()), "x"))] == ["a", "b"]


@pytest.mark.parametrize("content", [b"[1", b"[" * 100_000, b'"text"', b"\xff"])
def test_json_that_is_none_is_an_error(content):
    with pytest.raises(DataError):
        list(read_json(io.BytesIO(content), "x.json"))


def test_a_large_json_file_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(tables, "MAX_JSON_BYTES", 10)
    with pytest.raises(DataError) as caught:
        list(read_json(io.BytesIO(b" " * 11), "x.json"))
    assert "jsonl" in caught.value.hint

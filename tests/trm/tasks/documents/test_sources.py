"""Several sources are one stream, which continues after any message."""

import json
import os
from functools import reduce

import pytest
from mail_files import messages, write_mbox

from trm.tasks.documents import mailboxes
from trm.tasks.documents.folders import open_regular
from trm.tasks.documents.sources import Position, describe_source, messages_of

RAWS = messages(9)


@pytest.fixture
def sources(tmp_path):
    """Return one source of each kind."""
    rows = [{"subject": f"s{number}", "text": "x", "label": "a"} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.csv").write_text("subject,text\na,b\nc,d\n")
    (tmp_path / "one.eml").write_bytes(RAWS[0])
    write_mbox(tmp_path / "all.mbox", RAWS)
    directory = tmp_path / "directory"
    (directory / "work").mkdir(parents=True)
    write_mbox(directory / "Inbox", RAWS)
    for number, raw in enumerate(RAWS):
        (directory / "work" / f"{number}.eml").write_bytes(raw)
    (directory / "work" / "empty.eml").touch()
    maildir = tmp_path / "maildir"
    for number, raw in enumerate(RAWS):
        path = maildir / ("new" if number % 2 else "cur") / f"{number}.host"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return [directory, *(tmp_path / name for name in ("all.mbox", "rows.jsonl", "one.eml")), maildir] + [
        tmp_path / name for name in ("rows.json", "rows.csv")
    ]


def test_a_stream_continues_after_every_message(sources):
    every = list(messages_of(sources))
    assert len(every) == 9 + 10 + 9 + 3 + 1 + 9 + 3 + 2
    assert [message.source for message in every] == sorted(message.source for message in every)
    for count in range(len(every) + 1):
        start = reduce(Position.after, every[:count], Position())
        assert list(messages_of(sources, start=start)) == every[count:]


def test_messages_of_a_directory_that_were_read_are_not_opened_again(sources, monkeypatch):
    opened = []
    monkeypatch.setattr(mailboxes, "open_regular", lambda path: opened.append(path) or open_regular(path))
    every = list(messages_of([sources[0] / "work"]))
    opened.clear()
    start = reduce(Position.after, every[:4], Position())
    assert list(messages_of([sources[0] / "work"], start=start)) == every[4:]
    assert [str(path) for path in opened] == [message.path for message in every[4:]]


def test_progress_counts_the_bytes_of_all_sources(sources):
    calls = []
    every = list(messages_of(sources, progress=lambda *facts: calls.append(facts)))
    assert len(calls) == len(every) + 1
    total = calls[0][2]
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1] == ("reading mail", total, total)
    assert all(done < total for _, done, _ in calls[:-1])


def test_a_changed_source_is_described_differently(sources):
    directory, mbox = sources[:2]
    for path, changed in ((directory, directory / "work" / "3.eml"), (mbox, mbox)):
        before = describe_source(path)
        assert describe_source(path) == before
        status = changed.stat()
        content = changed.read_bytes()
        changed.write_bytes(content.replace(b"e", b"o"))
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert describe_source(path) != before
        changed.write_bytes(content)
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert describe_source(path) == before
        with changed.open("ab") as file:
            file.write(b"\n")
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert describe_source(path) != before
    assert describe_source("-") is None


def test_reading_a_message_in_a_mail_program_does_not_change_a_maildir(sources):
    maildir = sources[4]
    before = describe_source(maildir)
    os.rename(maildir / "new" / "1.host", maildir / "cur" / "1.host:2,S")
    assert describe_source(maildir) == before

"""Messages of files, directories and streams, in a fixed order."""

import io
import json
import mailbox
import os
import socket
import subprocess
import sys

import pytest

from macbook_optimization.errors import DataError
from trm.tasks.documents import mailboxes
from trm.tasks.documents.folders import decode_folder_name
from trm.tasks.documents.mailboxes import detect_format, num_source_bytes, read_messages, read_stream

EML = b"Subject: s\n\nbody\n"
MBOX = b"".join(b"From a Mon Jan  1 00:00:00 2024\nSubject: %d\n\nbody\n\n" % number for number in range(3))


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def found(source, **options):
    """Return the name and labels of each message."""
    return [(message.key.rpartition("/")[2], *message.labels) for message in read_messages(source, **options)]


FILES = {
    "a.eml": (EML, "eml"),
    "mail": (EML, "eml"),
    "sent.txt": (MBOX, "mbox"),
    "b.mbox": (MBOX, "mbox"),
    "c.csv": (b"a,b\n", "csv"),
    "d.txt": (b"subject,text\n", "csv"),
    "e.json": (b"{}", "json"),
    "f": (b'[{"text": "a"}]', "json"),
    "g": (b'{"text": "a"}\n', "jsonl"),
    "h": (b'{\n"text": "a"}\n', "json"),
    "i.eml": (b"From a Mon Jan  1 00:00:00 2024\n" + EML, "eml"),
    "j.ndjson": (b"", "jsonl"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognised_by_its_name_and_content(tmp_path, name):
    content, expected = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert detect_format(tmp_path / name) == expected


def test_a_compressed_file_is_refused_with_a_command(tmp_path):
    (tmp_path / "a.mbox").write_bytes(b"\x1f\x8b\x08abc")
    with pytest.raises(DataError) as caught:
        read_messages(tmp_path / "a.mbox")
    assert "gzip -dk" in caught.value.hint


def test_the_format_can_be_given(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"odd,text\nx,y\n")
    assert [message.raw[-1:] for message in read_messages(tmp_path / "a.txt", "csv")] == [b"y"]
    with pytest.raises(DataError, match="no message of an mbox"):
        list(read_messages(tmp_path / "a.txt", "mbox"))


def test_messages_of_an_mbox_have_keys_that_lead_to_them(tmp_path):
    path = tmp_path / "in.mbox"
    path.write_bytes(MBOX)
    messages = list(read_messages(path))
    assert [message.key for message in messages] == [f"{path}#{number * 50}" for number in range(3)]
    assert list(read_messages(path, start_offset=messages[0].end_offset)) == messages[1:]
    assert messages[-1].end_offset == num_source_bytes(path) == len(MBOX)


def test_only_an_mbox_or_json_lines_can_be_continued(tmp_path):
    write(tmp_path, {"a.eml": EML})
    with pytest.raises(DataError, match="cannot be continued at byte 5"):
        read_messages(tmp_path / "a.eml", start_offset=5)


def test_folders_are_labels_and_the_order_is_that_of_names(tmp_path):
    write(
        tmp_path,
        {"work/b.eml": EML, "work/a.eml": EML, "home/x/c.eml": EML, "d.eml": EML, ".hidden/e.eml": EML},
    )
    assert found(tmp_path) == [("d.eml",), ("c.eml", "home/x"), ("a.eml", "work"), ("b.eml", "work")]
    assert num_source_bytes(tmp_path) == 4 * len(EML)
    assert [message.end_offset for message in read_messages(tmp_path)] == [17, 34, 51, 68]


def test_any_files_are_mail_in_a_directory_without_eml(tmp_path):
    write(
        tmp_path,
        {"ham/1": EML, "ham/2.txt": EML, "spam/3.ab12": EML, "index.csv": EML, "a.md": EML},
    )
    assert found(tmp_path) == [("1", "ham"), ("2.txt", "ham"), ("3.ab12", "spam")]


def test_other_files_are_left_out_beside_eml(tmp_path):
    write(tmp_path, {"a.eml": EML, "readme.txt": b"x"})
    assert found(tmp_path) == [("a.eml",)]


def test_an_mbox_in_a_directory_is_a_folder(tmp_path):
    write(
        tmp_path,
        {"Inbox": MBOX, "Inbox.msf": b"x", "Work.sbd/Plans": MBOX, "Old.mbox/mbox": MBOX, "a.mbox": MBOX},
    )
    labels = [labels for _, labels in found(tmp_path)]
    assert labels == ["Inbox"] * 3 + ["a"] * 3 + ["Old"] * 3 + ["Work/Plans"] * 3


def test_a_file_with_one_message_and_a_separator_is_in_its_folder(tmp_path):
    write(tmp_path, {"spam/1": b"From a Mon Jan  1 00:00:00 2024\n" + EML})
    assert found(tmp_path) == [("1", "spam")]


def test_a_maildir_with_folders_is_read(tmp_path):
    root = tmp_path / "Maildir"
    box = mailbox.Maildir(root)
    box.add(EML)
    box.add_folder("Work.Plans").add(EML)
    box.add_folder("&ATABXw-ler").add(EML)
    write(root, {"dovecot.index": b"x", "sub/cur/1:2,S": EML, "sub/new/2": EML})
    assert detect_format(root) == "maildir"
    labels = [labels for _, *labels in found(root)]
    assert labels == [["Inbox"], ["İşler"], ["Work/Plans"], ["sub"], ["sub"]]
    assert len(found(root, format="maildir")) == 5


def test_the_key_of_a_message_in_a_maildir_does_not_change_with_its_flags(tmp_path):
    write(tmp_path, {"new/17.host": EML, "cur/16.host:2,S": EML})
    before = [message.key for message in read_messages(tmp_path)]
    os.rename(tmp_path / "new/17.host", tmp_path / "cur/17.host:2,FRS")
    os.rename(tmp_path / "cur/16.host:2,S", tmp_path / "cur/16.host:2,")
    after = list(read_messages(tmp_path))
    assert [message.key for message in after] == before == [f"{tmp_path}/16.host", f"{tmp_path}/17.host"]
    assert after[1].path == f"{tmp_path}/cur/17.host:2,FRS"


def test_names_of_imap_folders_are_decoded():
    assert decode_folder_name("&ATABXw-, &-, &!-, &A-") == "İş, &, &!-, &A-"
    assert decode_folder_name("Ki&AV8-isel") == decode_folder_name("Kis\u0327isel") == "Kişisel"


def test_a_directory_without_mail_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no mail"):
        list(read_messages(tmp_path))
    write(tmp_path, {"a.eml": EML})
    with pytest.raises(DataError, match="read as maildir"):
        list(read_messages(tmp_path, "maildir"))


def test_links_that_leave_the_directory_and_pipes_are_skipped_with_a_reason(tmp_path, monkeypatch):
    outside = write(tmp_path / "outside", {"secret.eml": EML, "more/a.eml": EML})
    root = write(tmp_path / "root", {"a.eml": EML})
    (root / "b.eml").symlink_to(outside / "secret.eml")
    (root / "c.eml").symlink_to("a.eml")
    (root / "d.eml").symlink_to("d.eml")
    (root / "e").symlink_to(outside / "more")
    os.mkfifo(root / "f.eml")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(root)  # the path of a socket has at most 107 characters
        server.bind("g.eml")
    problems = {message.path.rpartition("/")[2]: message.problem for message in read_messages(root)}
    assert problems == {
        "a.eml": "",
        "b.eml": "a symbolic link that leaves the directory",
        "c.eml": "",
        "d.eml": "cannot be read",
        "e": "a symbolic link that leaves the directory",
        "f.eml": "not a regular file",
        "g.eml": "not a regular file",
    }


def test_a_pipe_or_device_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path / "missing"):
        with pytest.raises(DataError):
            read_messages(path)
        with pytest.raises(DataError):
            list(read_messages(path, "mbox"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_without_permission_is_skipped_with_the_reason(tmp_path):
    write(tmp_path, {"a.eml": EML, "b.eml": EML})
    (tmp_path / "a.eml").chmod(0)
    assert [bool(message.problem) for message in read_messages(tmp_path)] == [True, False]


def test_a_file_beyond_the_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes, "MAX_MESSAGE_BYTES", 10)
    write(tmp_path, {"a.eml": EML, "b.eml": b"S: x\n\ny"})
    assert [message.problem for message in read_messages(tmp_path)] == ["larger than 25 MiB", ""]


def test_messages_of_apple_mail_are_read(tmp_path):
    write(tmp_path, {"1.emlx": b"%d\n" % len(EML) + EML + b"<?xml version='1.0'?>"})
    assert [message.raw for message in read_messages(tmp_path)] == [EML]


@pytest.mark.parametrize("content", [EML, MBOX, b'{"text": "a"}\n' * 3, b"subject,text\na,b\n"])
def test_a_stream_is_recognised_and_read(content):
    class Slowly(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:1])

    messages = list(read_stream(io.BufferedReader(Slowly(content)), "-"))
    assert len(messages) == (3 if content.count(b"\n") > 3 or content.startswith(b"{") else 1)
    assert messages[-1].end_offset == len(content)


def test_standard_input_is_a_source(tmp_path):
    code = "from trm.tasks.documents.mailboxes import read_messages\nprint(len(list(read_messages('-'))))"
    answer = subprocess.run([sys.executable, "-c", code], input=MBOX, capture_output=True, check=True)
    assert answer.stdout.strip() == b"3"


def test_tables_name_their_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": "x"}) + "\n" for text in "ab"))
    assert found(path) == [("a.jsonl#0", "x"), ("a.jsonl#28", "x")]


@pytest.mark.parametrize(
    ("name", "content"),
    [("b.mbox", MBOX), ("d.jsonl", b'{"subject": "a", "body": "b"}\n{"subject": "c", "body": "d"}\n')],
)
def test_the_key_of_a_message_is_a_source(tmp_path, name, content):
    root = write(tmp_path, {name: content})
    for message in read_messages(root / name):
        assert [each.raw for each in read_messages(message.key)] == [message.raw]


def test_a_number_without_a_message_is_an_error(tmp_path):
    root = write(tmp_path, {"b.mbox": MBOX, "c.csv": b"subject,body\na,b\n"})
    with pytest.raises(DataError, match="no message of an mbox at byte 3"):
        list(read_messages(root / "b.mbox#3"))
    with pytest.raises(DataError, match=r"c\.csv has no message 99"):
        list(read_messages(root / "c.csv#99"))


def test_a_file_whose_name_has_a_number_sign_is_read(tmp_path):
    root = write(tmp_path, {"a": EML, "a#1": EML})
    assert found(root / "a#1") == [("a#1",)]

"""A sorted copy of any mail keeps every byte, and is complete or absent."""

import mailbox
import os
from collections import Counter

import pytest
from letters import TOPICS, letter, write_mailbox

from trm.mail.deciding import open_classifier
from trm.mail.model import Decision
from trm.mail.reading import Features, Read
from trm.mail.sorted_copy import copy_sorted
from trm.tasks.documents import mailboxes
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.sources import messages_of


def decided(sources, category="work", unsure=False):
    for message in messages_of(sources):
        read = Read(message, Features(Mail("parsed", date=1e9), Counter()))
        yield read, None if message.problem else Decision(category, 0.9, unsure, {})


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_directory_is_sorted_by_a_model(trained, tmp_path):
    source = write_mailbox(tmp_path / "mail", num_each=5, seed=4)
    before = files(source)
    with open_classifier(trained[0]) as classifier:
        copied = copy_sorted(classifier.decide(messages_of([source]), 0.5), tmp_path / "sorted")
    assert files(source) == before
    found = mailbox.Maildir(tmp_path / "sorted", create=False)  # as another program sees it
    assert set(found.list_folders()) <= set(TOPICS)
    counts = {name: len(found.get_folder(name)) for name in found.list_folders()}
    assert counts == copied.by_category
    assert sum(counts.values()) + len(found) == 15
    written = [content for name, content in files(tmp_path / "sorted").items() if "maildirfolder" not in name]
    assert Counter(written) == Counter(before.values())


def test_unsure_messages_are_in_the_inbox_and_only_for_their_owner(tmp_path):
    (tmp_path / "letter.eml").write_bytes(letter("work", 1))
    copied = copy_sorted(decided([tmp_path / "letter.eml"], unsure=True), tmp_path / "sorted")
    assert copied.unsure == 1
    (path,) = (tmp_path / "sorted" / "new").iterdir()
    assert path.read_bytes() == letter("work", 1)
    for each in (tmp_path / "sorted", *(tmp_path / "sorted").rglob("*")):
        assert each.stat().st_mode & 0o077 == 0


def test_messages_of_an_mbox_keep_their_bytes_and_dates(tmp_path):
    separator = b"From a Mon Jan  1 00:00:00 2024\n"
    content = [b"Subject: one\n\n\xff\r\ntext\n", b"Subject: two\n"]
    (tmp_path / "mail.mbox").write_bytes(b"".join(separator + each + b"\n" for each in content))
    copy_sorted(decided([tmp_path / "mail.mbox"]), tmp_path / "sorted")
    paths = sorted((tmp_path / "sorted" / ".work" / "new").iterdir())
    assert [path.read_bytes() for path in paths] == content
    assert paths[0].stat().st_mtime == 1e9


def test_messages_of_a_maildir_keep_their_names_flags_and_times(tmp_path):
    for folder in ("mail", "mail/.Work"):
        for part in ("cur", "new", "tmp"):
            (tmp_path / folder / part).mkdir(parents=True)
    for folder in ("mail", "mail/.Work"):  # the same name in two folders
        path = tmp_path / folder / "cur" / "1.a.host:2,FS"
        path.write_bytes(folder.encode())
        os.utime(path, (7, 7))
    copy_sorted(decided([tmp_path / "mail"]), tmp_path / "sorted")
    paths = sorted((tmp_path / "sorted" / ".work" / "cur").iterdir())
    assert [path.name for path in paths] == ["1.1.a.host:2,FS", "1.a.host:2,FS"]
    assert {path.read_bytes() for path in paths} == {b"mail", b"mail/.Work"}
    assert {path.stat().st_mtime for path in paths} == {7}


def test_a_message_that_is_too_large_to_parse_is_copied_as_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes, "MAX_MESSAGE_BYTES", 100)
    (tmp_path / "large.eml").write_bytes(b"Subject: large\n\n" + b"x" * 200)
    copied = copy_sorted(decided([tmp_path / "large.eml"]), tmp_path / "sorted")
    assert (copied.skipped, copied.left_out) == (1, {})
    (path,) = (tmp_path / "sorted" / "new").iterdir()
    assert path.read_bytes() == (tmp_path / "large.eml").read_bytes()


def test_messages_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "one.eml").write_bytes(letter("work", 1))
    (tmp_path / "mail" / "two.eml").symlink_to("/etc/passwd")
    copied = copy_sorted(decided([tmp_path / "mail"]), tmp_path / "sorted")
    assert copied.by_category == {"work": 1}
    assert copied.left_out == {
        str(tmp_path / "mail" / "two.eml"): "a symbolic link that leaves the directory"
    }


def test_an_interrupted_copy_leaves_nothing(tmp_path):
    (tmp_path / "letter.eml").write_bytes(letter("work", 1))

    def interrupted():
        yield from decided([tmp_path / "letter.eml"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_sorted(interrupted(), tmp_path / "below" / "sorted")
    assert os.listdir(tmp_path) == ["letter.eml"]


def test_a_dry_run_writes_nothing(tmp_path):
    (tmp_path / "letter.eml").write_bytes(letter("work", 1))
    copied = copy_sorted(decided([tmp_path / "letter.eml"]), tmp_path / "sorted", dry_run=True)
    assert copied.by_category == {"work": 1}
    assert os.listdir(tmp_path) == ["letter.eml"]

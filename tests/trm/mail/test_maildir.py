"""The folder of a category: any name is safe, and is read back as the same category."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import DataError
from trm.mail.maildir import INBOX, Listing, Place, folder_of, make_folder, remove_empty_folder
from trm.tasks.documents.folders import decode_folder_name, encode_folder_name
from trm.tasks.documents.mailboxes import read_messages

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
HOSTILE = st.text(st.sampled_from("./\\~:&,-+ aéİ€\U0001f600\0\n\x1b\x7f"), min_size=1)


@pytest.mark.parametrize(
    ("category", "folder"),
    [
        ("work", ".work"),
        ("Work/Projects", ".Work.Projects"),
        ("İş", ".&ATABXw-"),
        ("R&D", ".R&-D"),
        ("..", ".&AC4ALg-"),
        ("../../etc", ".&AC4ALg-.&AC4ALg-.etc"),
        ("/etc/passwd", ".&AC8-etc.passwd"),
        ("a//b", ".a&AC8ALw-b"),
        ("a.b", ".a&AC4-b"),
        ("a\0b\n", ".a&AAA-b&AAo-"),
        ("Inbox", INBOX),
        ("INBOX", INBOX),
    ],
)
def test_folders_by_hand(category, folder):
    assert folder_of(category) == folder


@given(NAMES | HOSTILE)
def test_a_folder_is_one_plain_name_below_the_maildir(category):
    folder = folder_of(category)
    assert folder == INBOX or (
        folder.startswith(".") and "/" not in folder and folder.strip(".") and ".." not in folder
    )
    assert folder.isascii()
    assert folder.isprintable()
    assert len(folder) <= 200


@given(NAMES | HOSTILE)
def test_names_round_trip(name):
    assert decode_folder_name(encode_folder_name(name)) == unicodedata.normalize("NFC", name)


@given(st.lists(NAMES | HOSTILE, min_size=2, max_size=2, unique=True))
def test_different_categories_have_different_folders(pair):
    one, other = map(folder_of, pair)
    assert one != other or one == INBOX


def test_unpaired_surrogates_and_long_names_have_folders():
    assert folder_of("a\udc80") == ".a&3IA-"
    long = "ş" * 500
    assert len(folder_of(long)) <= 200
    assert folder_of(long) != folder_of(long + "a")
    with pytest.raises(DataError, match="without a name"):
        folder_of("")


@settings(max_examples=40)
@given(category=(NAMES | HOSTILE).filter(lambda name: len(folder_of(name)) < 190))
def test_a_category_is_read_back_from_its_folder(category, tmp_path_factory):
    root = tmp_path_factory.mktemp("maildir")
    folder = folder_of(category)
    make_folder(root, INBOX)
    make_folder(root, folder)
    (root / folder / "cur" / "1.a.b:2,S").write_bytes(b"Subject: hello\n\n")
    (message,) = read_messages(root)
    (label,) = message.labels
    assert label == ("Inbox" if folder == INBOX else unicodedata.normalize("NFC", category))


def test_a_folder_is_for_its_owner_only_and_marked(tmp_path):
    make_folder(tmp_path, ".work")
    assert {path.name for path in (tmp_path / ".work").iterdir()} == {"cur", "new", "tmp", "maildirfolder"}
    for path in [tmp_path / ".work", *(tmp_path / ".work").iterdir()]:
        assert path.stat().st_mode & 0o077 == 0
    make_folder(tmp_path, ".work")
    assert remove_empty_folder(tmp_path, ".work")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_created_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "maildir").mkdir()
    (tmp_path / "maildir" / ".work").symlink_to("../elsewhere")
    with pytest.raises(DataError, match="is not a directory"):
        make_folder(tmp_path / "maildir", ".work")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("path", ["cur/1.a.b:2,S", "dovecot.index"])
def test_a_folder_that_something_is_in_stays(tmp_path, path):
    make_folder(tmp_path, ".work")
    (tmp_path / ".work" / path).touch()
    assert not remove_empty_folder(tmp_path, ".work")
    assert (tmp_path / ".work" / path).exists()


def test_a_message_is_found_after_its_flags_changed(tmp_path):
    make_folder(tmp_path, INBOX)
    (tmp_path / "cur" / "1.a.b:2,RS").touch()
    listing = Listing(Path(tmp_path))
    assert listing.find(Place(INBOX, "new", "1.a.b")) == Place(INBOX, "cur", "1.a.b:2,RS")
    assert listing.find(Place(INBOX, "new", "1.a")) is None

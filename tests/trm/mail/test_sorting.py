"""Sorting a Maildir: messages are moved as they are, and everything can be taken back."""

import json
import os
import shutil
from collections import Counter

import pytest
from faults.operations import in_fork, intercepted, killing, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import DataError
from trm.mail import journal, sorting
from trm.mail.maildir import INBOX, folder_of, make_folder
from trm.mail.model import Decision
from trm.mail.reading import Features, Read
from trm.mail.sorting import messages_of_folder, sort_folder, undo_sort
from trm.tasks.documents.mail import Mail

CATEGORIES = ("work", "Work/Projects", "../spam", "İş", "Inbox")


def read_of(message):
    return Read(message, Features(Mail("parsed"), Counter()))


def decision(category, unsure=False):
    return Decision(category, 0.5 if unsure else 0.99, unsure, {})


def decided(root, choose, folder=INBOX):
    return [(read_of(message), choose(message)) for message in messages_of_folder(root, folder)]


def write(root, names, folder=INBOX):
    make_folder(root, folder)
    for number, name in enumerate(names):
        path = root / folder / name
        path.write_bytes(f"Subject: {number}\n\n{name}\n".encode())
        os.utime(path, (number, number))
    return root


def tree(root):
    """Return every path with what must not change; times of directories do."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
    }


def messages_in(found):
    return Counter(each for each in found.values() if each is not None and each[0].startswith(b"Subject"))


@pytest.fixture
def maildir(tmp_path):
    names = ["new/1.a.host", "cur/2.b.host:2,S", "cur/3.c.host:2,FRS", "new/4.d.host", "cur/5.e.host:2,"]
    return write(tmp_path / "Maildir", names)


def by_number(root, categories):
    chosen = dict(zip("12345", categories, strict=False))
    return decided(root, lambda message: chosen[message.key.rpartition("/")[2][0]])


def test_messages_are_moved_with_their_names_and_flags(maildir):
    before = tree(maildir)
    outcome = sort_folder(
        maildir,
        INBOX,
        by_number(
            maildir, [decision("work"), decision("İş"), decision("work", True), None, decision("Inbox")]
        ),
    )
    after = tree(maildir)
    assert after[".work/new/1.a.host"] == before["new/1.a.host"]
    assert after[".&ATABXw-/cur/2.b.host:2,S"] == before["cur/2.b.host:2,S"]
    for name in ("cur/3.c.host:2,FRS", "new/4.d.host", "cur/5.e.host:2,"):
        assert after[name] == before[name]
    assert (outcome.by_category, outcome.unsure, outcome.skipped, outcome.in_place) == (
        {"work": 1, "İş": 1}, 1, 1, 1,
    )  # fmt: skip
    assert oct((maildir / journal.FILE_NAME).stat().st_mode & 0o777) == "0o600"
    assert not (maildir / journal.LOCK_NAME).exists()


def test_a_dry_run_changes_nothing(maildir):
    before = tree(maildir)
    outcome = sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("work")), dry_run=True)
    assert len(outcome.moved) == 5
    assert tree(maildir) == before


def test_another_folder_is_sorted_into_the_inbox(tmp_path):
    root = write(tmp_path / "Maildir", [])
    write(root, ["new/1.a.host"], ".Work")
    sort_folder(root, ".Work", decided(root, lambda _: decision("Inbox"), ".Work"))
    assert (root / "new" / "1.a.host").exists()


@settings(max_examples=40)
@given(
    parts=st.lists(st.tuples(st.sampled_from(["cur", "new"]), st.sampled_from(["", ":2,", ":2,S", ":2,FT"]))),
    answers=st.lists(st.none() | st.tuples(st.sampled_from(CATEGORIES), st.booleans()), min_size=1),
    sorts=st.integers(1, 3),
)
def test_undo_restores_the_exact_tree(parts, answers, sorts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sort")
    names = [f"{part}/{number}.x.host{flags}" for number, (part, flags) in enumerate(parts)]
    root = write(directory / "Maildir", names)
    write(root, ["cur/0.y.host:2,"], ".work")
    before = messages_in(tree(root))
    states = []
    for each in range(sorts):
        states.append(tree(root))
        chosen = iter(range(each, 10_000))

        def choose(_, chosen=chosen):
            answer = answers[next(chosen) % len(answers)]
            return None if answer is None else decision(*answer)

        if not sort_folder(root, INBOX, decided(root, choose)).moved:
            states.pop()
        assert messages_in(tree(root)) == before
    for number, state in enumerate(reversed(states), start=1):
        undone = undo_sort(root)
        assert undone.is_complete
        assert undone.earlier_sorts == len(states) - number
        expected = {name: value for name, value in state.items() if name != journal.FILE_NAME}
        assert {name: value for name, value in tree(root).items() if name != journal.FILE_NAME} == expected
    assert undo_sort(root) is None
    assert not (root / journal.FILE_NAME).exists()


@pytest.mark.slow
def test_a_crash_at_any_operation_loses_nothing_and_can_be_undone(tmp_path, monkeypatch):
    """`os.rename` stands for the system call, as only functions of `os` can be intercepted."""
    monkeypatch.setattr(sorting, "rename_exclusively", lambda *paths: os.rename(*paths))
    template = write(tmp_path / "template", [f"new/{number}.x.host" for number in range(4)])
    write(template, ["cur/9.x.host:2,S"], ".spam")
    choices = dict(zip("0123", ["work", "spam", "work", "İş"], strict=True))

    def sort(root):
        sort_folder(
            root, INBOX, decided(root, lambda each: decision(choices[each.key.rpartition("/")[2][0]]))
        )

    rehearsal = shutil.copytree(template, tmp_path / "rehearsal")
    operations = recorded(rehearsal, lambda: sort(rehearsal))
    assert sum(operation.name == "rename" for operation in operations) == 4
    before = tree(template)
    for at in range(len(operations)):
        for share in (None, 0.5):
            root = shutil.copytree(template, tmp_path / f"{at} {share}")

            def crash(root=root, at=at, share=share):
                with intercepted(root, killing(at, share)):
                    sort(root)

            in_fork(crash)
            assert messages_in(tree(root)) == messages_in(before), operations[at]
            undone = undo_sort(root)
            assert undone is None or undone.is_complete
            left = {name: value for name, value in tree(root).items() if not name.startswith("trm-sort")}
            assert left == before, operations[at]
            shutil.rmtree(root)


def test_a_crash_while_undoing_can_be_undone(maildir):
    before = tree(maildir)
    sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("work")))
    os.rename(maildir / ".work" / "new" / "1.a.host", maildir / "new" / "1.a.host")  # as far as it got
    undone = undo_sort(maildir)
    assert (undone.moved_back, undone.in_place) == (4, 1)
    assert tree(maildir) == before


def test_a_message_with_two_names_after_a_crash_has_one_again(maildir):
    before = tree(maildir)
    sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("work")))
    os.link(maildir / ".work" / "new" / "1.a.host", maildir / "new" / "1.a.host")
    assert undo_sort(maildir).is_complete
    assert tree(maildir) == before


def test_flags_that_a_reader_changed_stay_changed(maildir):
    sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("work")))
    work = maildir / ".work"
    os.rename(work / "new" / "1.a.host", work / "cur" / "1.a.host:2,RS")
    os.rename(work / "cur" / "2.b.host:2,S", work / "cur" / "2.b.host:2,ST")
    undone = undo_sort(maildir)
    assert (undone.moved_back, undone.with_other_flags, undone.is_complete) == (5, 2, True)
    assert sorted(os.listdir(maildir / "cur")) == [
        "1.a.host:2,RS", "2.b.host:2,ST", "3.c.host:2,FRS", "5.e.host:2,",
    ]  # fmt: skip
    assert not work.exists()


def test_what_cannot_be_undone_is_reported(maildir):
    sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("work")))
    (maildir / ".work" / "new" / "1.a.host").unlink()
    (maildir / "new" / "4.d.host").write_text("another message")
    (maildir / ".work" / "dovecot.index").touch()
    undone = undo_sort(maildir)
    assert [str(place) for place in undone.gone] == [".work/new/1.a.host"]
    assert [str(place) for place in undone.occupied] == [".work/new/4.d.host"]
    assert undone.kept_folders == [".work"]
    assert (maildir / "new" / "4.d.host").read_text() == "another message"
    (maildir / "new" / "4.d.host").unlink()  # the other one is out of the way: it can be taken back now
    (maildir / ".work" / "dovecot.index").unlink()
    undone = undo_sort(maildir)
    assert (undone.moved_back, undone.is_complete) == (1, True)
    assert not (maildir / ".work").exists()
    assert not (maildir / journal.FILE_NAME).exists()


def test_a_message_of_the_same_name_is_not_overwritten(maildir):
    write(maildir, ["cur/1.a.host:2,S"], ".work")  # another message, or a copy, with other flags
    before = tree(maildir)
    choices = [decision("work"), *[decision("work", True)] * 4]
    outcome = sort_folder(maildir, INBOX, by_number(maildir, choices))
    assert (outcome.moved, outcome.occupied) == ([], 1)
    assert tree(maildir) == before


def test_messages_that_change_meanwhile_are_found_or_counted(maildir):
    found = decided(maildir, lambda _: decision("work"))
    os.rename(maildir / "new" / "1.a.host", maildir / "cur" / "1.a.host:2,S")
    (maildir / "new" / "4.d.host").unlink()
    outcome = sort_folder(maildir, INBOX, found)
    assert (len(outcome.moved), outcome.gone) == (4, 1)
    assert (maildir / ".work" / "cur" / "1.a.host:2,S").exists()
    undone = undo_sort(maildir)
    assert (undone.moved_back, len(undone.gone)) == (4, 1)


def test_two_sorts_at_the_same_time_are_refused(maildir):
    with journal.locked(maildir), pytest.raises(DataError, match="being sorted by another process"):
        undo_sort(maildir)


@pytest.mark.parametrize(
    "line",
    [
        {"from": ["", "cur", "../../etc/passwd"], "to": ["", "cur", "a"]},
        {"from": ["..", "cur", "a"], "to": ["", "cur", "a"]},
        {"from": ["", "cur", "a"], "to": ["work", "cur", "a"]},
        {"from": ["", "tmp", "a"], "to": ["", "cur", "a"]},
        {"from": ["", "cur"], "to": ["", "cur", "a"]},
        {"folder": ".."},
        {"folder": "a/b"},
        {"from": ["", "cur", 7], "to": ["", "cur", "a"]},
        [],
    ],
)
def test_a_journal_that_leaves_the_maildir_is_refused(maildir, line):
    path = maildir / journal.FILE_NAME
    path.write_text(json.dumps({"sort": "now"}) + "\n" + json.dumps(line) + "\n")
    path.chmod(0o600)
    with pytest.raises(DataError, match="damaged in line 2"):
        undo_sort(maildir)


def test_a_journal_that_others_can_write_is_refused(maildir):
    path = maildir / journal.FILE_NAME
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(DataError, match="only you can read and write"):
        undo_sort(maildir)
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(DataError, match="only you can read and write"):
        undo_sort(maildir)


def test_a_torn_last_line_is_ignored_and_removed(maildir):
    before = tree(maildir)
    sort_folder(maildir, INBOX, by_number(maildir, [decision("work"), *[None] * 4]))
    path = maildir / journal.FILE_NAME
    path.write_bytes(path.read_bytes() + b'{"from": ["", "cur", "2.b')
    sort_folder(maildir, INBOX, decided(maildir, lambda _: decision("spam")))
    assert undo_sort(maildir).earlier_sorts == 1
    assert undo_sort(maildir).is_complete
    assert tree(maildir) == before


def test_the_journal_forgets_the_oldest_of_very_many_moves(maildir, monkeypatch):
    monkeypatch.setattr(journal, "_MAX_KEPT_MOVES", 1)
    for category in ("work", "spam"):
        sort_folder(maildir, INBOX, by_number(maildir, [decision(category), *[None] * 4]))
        shutil.copyfile(maildir / folder_of(category) / "new" / "1.a.host", maildir / "new" / "1.a.host")
    sort_folder(maildir, INBOX, by_number(maildir, [decision("İş"), *[None] * 4]))
    assert undo_sort(maildir).earlier_sorts == 1

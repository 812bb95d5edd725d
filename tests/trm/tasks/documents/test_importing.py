"""An import continues where it was interrupted, and its dataset is the same as that of one that was not."""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mail_files import WORDS, message, messages, write_mbox
from tiny import TRM, Recorder

from macbook_optimization.errors import DataError
from trm.tasks.dataset import open_split
from trm.tasks.documents.collecting import choose_sample
from trm.tasks.documents.email import EmailTask
from trm.tasks.documents.importing import identity_of
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.records import Facts, pack_content, record_of, unpack_content
from trm.tasks.documents.sources import messages_of
from trm.tasks.documents.spool import CONTENTS_FILE, STATE_FILE, SpoolWriter, open_spool
from trm.tasks.documents.tokens import TRAINING_TOKENS, MailTokenizer, bounded

pytest.importorskip("tokenizers")

COUNT = 150
OPTIONS = {"length": 32, "vocab_size": 200, "test_share": 0.25}


class Stopping(Recorder):
    """A display that records what was read, and presses Ctrl-C at some progress."""

    def __init__(self, at=""):
        super().__init__()
        self.at = at
        self.num_read = 0

    def update(self, what, done, total, *facts):
        self.num_read += what == "reading mail" and done < total
        if what == self.at:
            raise KeyboardInterrupt


def build(source, directory, display=None, checkpoint_seconds=5.0, **changes):
    task = EmailTask()
    task.checkpoint_seconds = checkpoint_seconds
    return task.build_shown({"from": [str(source)], **OPTIONS, **changes}, directory, display or Recorder())


def content_of(directory):
    """Return the bytes of all files of a dataset, apart from the name of its source."""
    files = {path.relative_to(directory): path for path in directory.rglob("*") if path.is_file()}
    found = {str(name): path.read_bytes() for name, path in files.items()}
    facts = json.loads(found["build.json"])
    del facts["options"]["source"]
    return {**found, "build.json": json.dumps(facts)}


@pytest.fixture(scope="module")
def mbox(tmp_path_factory):
    return write_mbox(tmp_path_factory.mktemp("mail") / "all.mbox", messages(COUNT))


@pytest.fixture(scope="module")
def whole(mbox, tmp_path_factory):
    """Return a dataset that was built without interruption, and what was reported about it."""
    directory = tmp_path_factory.mktemp("whole") / "set"
    return directory, build(mbox, directory)["quality"]


@pytest.fixture
def interrupted(monkeypatch):
    """Return a function that makes an import stop after some messages, as Ctrl-C does."""

    def stop_after(count):
        def append(self, message, record):
            if self.state.num_messages == count:
                raise KeyboardInterrupt
            original(self, message, record)

        monkeypatch.setattr(SpoolWriter, "append", append)

    original = SpoolWriter.append
    yield stop_after
    monkeypatch.undo()


@pytest.mark.slow
def test_every_message_is_counted_once(whole):
    directory, quality = whole
    assert quality["messages"] == sum(quality["verdicts"].values()) == COUNT
    left_out = quality["without_category"] + quality["verdicts"]["skipped"]
    assert quality["used"] + left_out == COUNT
    assert sum(quality["languages"].values()) == quality["used"] == sum(quality["categories"].values())
    assert quality["reasons"]["skipped"] == {"empty": 7}
    assert quality["exact_copies"] > 10
    assert quality["empty"] == 5
    assert sum(len(open_split(directory, name)) for name in ("train", "test")) == quality["used"]
    assert not directory.with_name("set.import").exists()


@pytest.mark.slow
def test_ctrl_c_loses_nothing_that_was_read(mbox, whole, tmp_path, interrupted, monkeypatch):
    interrupted(60)
    display = Recorder()
    with pytest.raises(KeyboardInterrupt):
        build(mbox, tmp_path / "set", display)
    assert "keeps 60 messages" in display.messages[-1]
    assert not (tmp_path / "set").exists()
    monkeypatch.undo()
    display = Stopping("training the tokenizer")
    with pytest.raises(KeyboardInterrupt):
        build(mbox, tmp_path / "set", display)
    assert "after 60 messages" in display.messages[0]
    assert display.num_read == COUNT - 60
    display = Stopping()
    facts = build(mbox, tmp_path / "set", display)
    assert display.num_read == 0
    assert facts["quality"] == whole[1]
    assert content_of(tmp_path / "set") == content_of(whole[0])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[4:]
from trm.tasks.documents import importing, spool
from test_importing import Recorder, build
from pathlib import Path

kind, _, when = sys.argv[3].partition(":")

def die(*facts):
    os.kill(os.getpid(), signal.SIGKILL)

if kind == "append":
    original = spool.SpoolWriter.append
    def append(self, message, record):
        original(self, message, record)
        if self.state.num_messages == int(when):
            die()
    spool.SpoolWriter.append = append
elif kind == "save":
    original = spool.State.save
    def save(self, directory):
        if self.num_messages == int(when):
            die()
        original(self, directory)
    spool.State.save = save
elif kind == "remove":
    importing.remove_spool = die
display = Recorder(lambda what, done: what == when and die())
build(sys.argv[1], Path(sys.argv[2]), display, checkpoint_seconds=0.0)  # after every message
"""


def build_and_kill(source, directory, point):
    """Build in a process that is killed without warning, as by a power failure."""
    paths = [path for path in sys.path if Path(path).is_dir()]
    command = [sys.executable, "-c", KILLED, str(source), str(directory), point, *paths]
    return subprocess.run(command, capture_output=True, text=True).returncode


@pytest.mark.slow
def test_a_killed_build_continues_and_gives_the_same_dataset(mbox, whole, tmp_path):
    points = ["save:0", "append:1", "save:40", "append:77", "append:150"]
    points += ["update:training the tokenizer", "update:writing train", "update:writing test"]
    for point in points:
        assert build_and_kill(mbox, tmp_path / "set", point) == -signal.SIGKILL, point
        assert not (tmp_path / "set").exists()
    display = Stopping()
    build(mbox, tmp_path / "set", display)
    assert display.num_read == 0
    assert content_of(tmp_path / "set") == content_of(whole[0])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.slow
def test_text_of_messages_does_not_stay_behind_if_a_build_is_killed_at_its_end(mbox, whole, tmp_path):
    assert build_and_kill(mbox, tmp_path / "set", "remove") == -signal.SIGKILL
    assert content_of(tmp_path / "set") == content_of(whole[0])
    assert (tmp_path / "set.import").exists()
    with pytest.raises(DataError, match="already exists"):
        build(mbox, tmp_path / "set")
    assert not (tmp_path / "set.import").exists()


@pytest.mark.slow
def test_a_directory_and_several_sources_continue(tmp_path, interrupted, monkeypatch):
    for number, raw in enumerate(messages(40)):
        folder = tmp_path / "mail" / list(WORDS)[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.eml").write_bytes(raw)
    rows = [
        {"text": f"{word} {number}", "label": name}
        for name in WORDS
        for number, word in enumerate(WORDS[name])
    ]
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    )
    both = {"from": [str(tmp_path / "mail"), str(tmp_path / "rows.csv")]}
    build("", tmp_path / "whole", **both)
    interrupted(45)
    with pytest.raises(KeyboardInterrupt):
        build("", tmp_path / "set", **both)
    monkeypatch.undo()
    build("", tmp_path / "set", **both)
    assert content_of(tmp_path / "set") == content_of(tmp_path / "whole")


def record(directory, source, told, length=32):
    """Import without workers and without a dataset. Return how many messages had been read before."""
    with open_spool(directory, identity_of([source], length), told.append) as spool:
        num_before = spool.state.num_messages
        with SpoolWriter(spool) as writer:
            for each in messages_of([source], start=spool.state.position):
                writer.append(each, record_of(each.raw, 10))
    return num_before


def append_a_message(source, directory):
    with source.open("ab") as file:
        file.write(b"From someone Mon Jan  1 00:00:00 2024\n" + message(1, np.random.default_rng(9)) + b"\n")


def damage_the_state(source, directory):
    (directory / STATE_FILE).write_text("{")


def shorten_the_contents(source, directory):
    os.truncate(directory / CONTENTS_FILE, 100)


def remove_the_contents(source, directory):
    (directory / CONTENTS_FILE).unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (append_a_message, "all.mbox has changed"),
        (damage_the_state, "state.json is damaged"),
        (shorten_the_contents, "contents is incomplete"),
        (remove_the_contents, "contents is missing"),
    ],
)
def test_an_import_that_cannot_be_continued_starts_anew_and_says_so(mbox, tmp_path, change, reason):
    source = Path(shutil.copy2(mbox, tmp_path / "all.mbox"))
    directory, told = tmp_path / "set.import", []
    assert record(directory, source, told) == 0
    assert record(directory, source, told) == COUNT
    assert not told
    change(source, directory)
    assert record(directory, source, told) == 0
    assert f"starts anew: {reason}" in told[0].replace(f"{tmp_path}/", "")
    assert record(directory, source, told) == COUNT + (change is append_a_message)


def test_other_sources_and_lengths_are_not_mixed(mbox, tmp_path):
    other = Path(shutil.copy2(mbox, tmp_path / "other.mbox"))
    told = []
    assert record(tmp_path / "set.import", mbox, told) == 0
    assert record(tmp_path / "set.import", other, told) == 0
    assert "begun with other sources" in told[-1]
    assert record(tmp_path / "set.import", other, told, length=2 * TRAINING_TOKENS) == 0
    assert "begun with other options" in told[-1]
    assert len(told) == 2
    for _ in range(2):  # one source twice
        with open_spool(tmp_path / "twice.import", identity_of([mbox, mbox], 32), told.append):
            assert len(told) == 2


def test_a_full_disk_is_reported_and_the_import_continues(mbox, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"Cannot write to .*: File too large") as caught:
            record(tmp_path / "set.import", mbox, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit" in caught.value.hint
    record(tmp_path / "set.import", mbox, told := [])
    assert record(tmp_path / "set.import", mbox, told) == COUNT
    assert not told


@pytest.mark.slow
def test_the_command_reports_what_the_mail_is_like(mbox, tmp_path):
    options = ["--from", str(mbox), "--out", "set", "--length", "32", "--vocab-size", "200", "--json"]
    command = [TRM, "data", "build", "email", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["quality"]["messages"] == COUNT
    assert facts["train"] + facts["test"] == facts["quality"]["used"]
    assert f"Messages     {COUNT}: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.slow
def test_another_split_continues_with_the_same_records(mbox, tmp_path):
    display = Stopping("training the tokenizer")
    with pytest.raises(KeyboardInterrupt):
        build(mbox, tmp_path / "set", display)
    display = Stopping()
    build(mbox, tmp_path / "set", display, seed=1, split="time", test_share=0.3)
    assert display.num_read == 0
    build(mbox, tmp_path / "whole", seed=1, split="time", test_share=0.3)
    assert content_of(tmp_path / "set") == content_of(tmp_path / "whole")


def test_only_the_owner_may_read_an_import(mbox, tmp_path, interrupted):
    interrupted(10)
    with pytest.raises(KeyboardInterrupt):
        build(mbox, tmp_path / "set")
    assert stat.S_IMODE((tmp_path / "set.import").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "set.import" / CONTENTS_FILE).stat().st_mode) == 0o600


def test_two_imports_to_one_place_are_refused(mbox, tmp_path):
    with (
        open_spool(tmp_path / "set.import", identity_of([mbox], 32), print),
        pytest.raises(DataError, match=f"Process {os.getpid()} is importing"),
    ):
        build(mbox, tmp_path / "set")


def test_a_directory_of_somebody_else_is_not_used(mbox, tmp_path):
    (tmp_path / "set.import").mkdir()
    (tmp_path / "set.import" / "letter.txt").write_text("x")
    with pytest.raises(DataError, match="is not an import of mail"):
        build(mbox, tmp_path / "set")
    assert (tmp_path / "set.import" / "letter.txt").exists()


def test_an_existing_dataset_is_refused_before_anything_is_read(mbox, tmp_path):
    (tmp_path / "set").mkdir()
    display = Stopping()
    with pytest.raises(DataError, match="already exists"):
        build(mbox, tmp_path / "set", display)
    assert display.num_read == 0


@pytest.mark.slow
def test_mail_without_a_category_is_reported_before_it_is_refused(tmp_path):
    source = write_mbox(tmp_path / "all.mbox", [b"Subject: x\n\ny\n"] * 3)
    display = Recorder()
    with pytest.raises(DataError, match="No message has a category"):
        build(source, tmp_path / "set", display)
    assert "3 without a category" in display.messages[0]


def test_records_keep_what_tokens_are_made_of():
    raws = [*messages(COUNT), b"Subject: \xf0\x9f\x99\x82 \xed\xa0\x80\n\n" + b"\x00\xff long" * 40_000]
    mails = [mail for raw in raws if (mail := parse_mail(raw)).verdict != "skipped"]
    kept = [unpack_content(pack_content(bounded(mail))) for mail in mails]
    assert max(len(mail.text) for mail in kept) < max(len(mail.text) for mail in mails)
    ours, theirs = (MailTokenizer.train(each, 300) for each in (mails, kept))
    assert ours.to_json() == theirs.to_json()
    for one, other in zip(ours.encode(mails, 64), ours.encode(kept, 64), strict=True):
        np.testing.assert_array_equal(one, other)


def test_facts_survive_their_line():
    facts = Facts("truncated", "text", True, "Turkish", ("a", "ş"), 1.5, "t", 3, "/x/\udcff#7", ("İş/b",))
    assert Facts.from_line(facts.to_line()) == facts
    assert record_of(b"", 10).facts == Facts("skipped", "empty", is_empty=True)


def test_a_vocabulary_is_made_of_a_bounded_sample_of_large_mailboxes():
    sizes = np.random.default_rng(0).integers(1, 1000, 5000)
    assert choose_sample(sizes, int(sizes.sum())).tolist() == list(range(5000))
    chosen = choose_sample(sizes, 500_000)
    assert 499_000 < sizes[chosen].sum() <= 500_000
    assert (np.diff(chosen) > 0).all()
    assert abs(np.mean(chosen) / 5000 - 0.5) < 0.05


MEASURED = """
import re, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from trm.tasks.documents.email import TASK

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

before = status("VmRSS")
options = {"from": [sys.argv[1]], "length": 64, "vocab_size": 500}
TASK.build(options, Path(sys.argv[2]), lambda *facts: None, jobs=2)
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
print(status("VmHWM") - before, children - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_texts_and_attachments_are_not_held_in_memory(tmp_path):
    """Measured: 29 MiB, and 32 MiB for twice as much mail, of which all texts in memory took 233 MiB."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS["Work"], 2500)) for _ in range(100)]
    head = "Subject: {}\nX-Gmail-Labels: {}\nContent-Type: {}\n\n"
    raws = [head.format(n, list(WORDS)[n % 2], "text/plain") + f"{texts[n % 100]} {n}\n" for n in range(750)]
    attached = [head.format(n, "Work", "application/pdf") + "abcdefgh\n" * 2**17 for n in range(10)]
    source = write_mbox(tmp_path / "all.mbox", [raw.encode() for raw in raws + attached])
    assert source.stat().st_size > 20 * 2**20
    paths = [path for path in sys.path if Path(path).is_dir()]
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "set"), *paths]
    own, worker = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert own < 70
    assert worker < 256

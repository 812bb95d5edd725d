"""Outputs replace earlier outputs of the same kind and nothing else."""

import json
import os
import zipfile

import pytest

from macbook_optimization.errors import DataError
from macbook_optimization.output_files import (
    GIF,
    PNG,
    STATE_DICT,
    FileKind,
    OutputFile,
    check_new_directory,
)
from trm.machine.benchmark_file import BENCHMARK
from trm.tasks.arc_submission import SUBMISSION

CONTENT = b"\x89PNG\r\n\x1a\n and the rest"


def write_state_dict(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")


OURS = {
    "PNG": (PNG, lambda path: path.write_bytes(CONTENT)),
    "GIF": (GIF, lambda path: path.write_bytes(b"GIF89a and the rest")),
    "submission": (SUBMISSION, lambda path: path.write_text('{"a": [{"attempt_1": 1, "attempt_2": 2}]}')),
    "report": (BENCHMARK, lambda path: path.write_text('{"kind": "trm bench"}')),
    "state dict": (STATE_DICT, write_state_dict),
}
FOREIGN = {
    "text": lambda path: path.write_text("dear diary"),
    "JSON": lambda path: path.write_text(json.dumps({"settings": [1, 2]})),
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff" * 100),
}


def state_of(directory):
    """Return what every path is, so that a change of any kind is noticed."""
    return {
        path.name: (os.lstat(path).st_mode, os.lstat(path).st_ino, path.is_file() and path.read_bytes())
        for path in sorted(directory.iterdir())
    }


@pytest.mark.parametrize("name", OURS)
def test_a_new_file_an_empty_one_and_an_earlier_output_are_written(tmp_path, name):
    kind, write_earlier = OURS[name]
    file = OutputFile(tmp_path / "out", kind)
    file.write(b"first")
    (tmp_path / "out").write_bytes(b"")
    file.write(b"second")
    write_earlier(tmp_path / "out")
    file.write(b"third")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out", b"third")]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("name", OURS)
def test_a_file_of_another_kind_is_replaced_only_on_request(tmp_path, name, foreign):
    FOREIGN[foreign](tmp_path / "out")
    before = state_of(tmp_path)
    kind, _ = OURS[name]
    with pytest.raises(DataError, match="cannot be written: there is a file that is not") as refused:
        OutputFile(tmp_path / "out", kind).check()
    assert "--force" in refused.value.hint
    assert state_of(tmp_path) == before
    OutputFile(tmp_path / "out", kind, force=True).write(CONTENT)
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.parametrize("content", ["", "task: sudoku"])
def test_a_kind_that_people_edit_is_replaced_only_on_request(tmp_path, content):
    edited = FileKind("a recipe", matches=None)
    OutputFile(tmp_path / "new", edited).write(CONTENT)
    (tmp_path / "out").write_text(content)
    with pytest.raises(DataError, match="cannot be written: it already exists") as refused:
        OutputFile(tmp_path / "out", edited).check()
    assert "--force" in refused.value.hint
    OutputFile(tmp_path / "out", edited, force=True).write(CONTENT)
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_an_image_of_another_format_is_another_kind(tmp_path):
    (tmp_path / "out").write_bytes(CONTENT)
    with pytest.raises(DataError, match="is not a GIF image"):
        OutputFile(tmp_path / "out", GIF).check()


PLACES = {
    "a directory": (os.mkdir, "it is a directory"),
    "a pipe": (os.mkfifo, "it is a pipe"),
    "a link to a device": (lambda path: path.symlink_to("/dev/full"), "it is a device"),
    "a dangling link": (lambda path: path.symlink_to("missing"), r"leads nowhere \(missing\)"),
    "a looping link": (lambda path: path.symlink_to("out"), "symbolic links"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_not_a_regular_file_is_never_replaced(tmp_path, kind, force):
    create, message = PLACES[kind]
    create(tmp_path / "out")
    before = state_of(tmp_path)
    file = OutputFile(tmp_path / "out", PNG, force)
    for attempt in (file.check, lambda: file.write(CONTENT)):
        with pytest.raises(DataError, match=message):
            attempt()
    assert state_of(tmp_path) == before


def test_a_device_node_stays_a_device_node(tmp_path):
    try:
        os.mknod(tmp_path / "full", 0o20666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("needs to create a device node")
    before = state_of(tmp_path)
    with pytest.raises(DataError, match="it is a device"):
        OutputFile(tmp_path / "full", PNG, force=True).write(CONTENT)
    assert state_of(tmp_path) == before


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "old.png").write_bytes(CONTENT)
    (tmp_path / "out").symlink_to("middle")
    (tmp_path / "middle").symlink_to("pictures/old.png")
    OutputFile(tmp_path / "out", PNG).write(CONTENT + b"2")
    assert os.readlink(tmp_path / "out") == "middle"
    assert os.readlink(tmp_path / "middle") == "pictures/old.png"
    assert [path.read_bytes() for path in (tmp_path / "pictures").iterdir()] == [CONTENT + b"2"]


def test_the_file_that_has_our_messages_is_not_replaced(tmp_path):
    """/dev/stdout may lead to a regular file."""
    with (tmp_path / "messages").open("wb") as messages:
        saved = os.dup(1)
        try:
            os.dup2(messages.fileno(), 1)
            with pytest.raises(DataError, match="the messages of this command go there"):
                OutputFile(tmp_path / "messages", PNG).check()
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def test_what_appeared_after_the_check_is_not_replaced(tmp_path):
    file = OutputFile(tmp_path / "out", PNG)
    file.check()
    os.mkfifo(tmp_path / "out")
    before = state_of(tmp_path)
    with pytest.raises(DataError, match="it is a pipe"):
        file.write(CONTENT)
    assert state_of(tmp_path) == before


def test_the_permissions_of_a_replaced_file_are_kept(tmp_path):
    (tmp_path / "out").write_bytes(CONTENT)
    for permissions in (0o600, 0o664, 0o666):
        (tmp_path / "out").chmod(permissions)
        OutputFile(tmp_path / "out", PNG).write(CONTENT)
        assert (tmp_path / "out").stat().st_mode & 0o777 == permissions


def test_files_of_the_user_beside_an_output_stay(tmp_path):
    for name in (".out.partial", ".out.mine.partial", ".out.999999999.partial"):
        (tmp_path / name).write_text("mine")
    before = state_of(tmp_path)
    OutputFile(tmp_path / "out", PNG).write(CONTENT)
    (tmp_path / "out").unlink()
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("missing/out", "there is no directory", "another file"),
        ("file/out", "Not a directory", "in the place of a directory"),
        ("x" * 300, "File name too long", "shorter"),
    ],
)
def test_an_impossible_place_is_found_before_the_work(tmp_path, path, message, hint):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=message) as refused:
        OutputFile(tmp_path / path, PNG).check()
    assert hint in refused.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_closed_directory_and_a_write_protected_file_are_found_before_the_work(tmp_path):
    (tmp_path / "out").write_bytes(CONTENT)
    (tmp_path / "out").chmod(0o400)
    with pytest.raises(DataError, match="write-protected"):
        OutputFile(tmp_path / "out", PNG).check()
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="is not writable"):
        OutputFile(tmp_path / "new", PNG).check()


def test_a_new_directory_is_refused_where_something_is(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("missing")
    (tmp_path / "loop").symlink_to("loop")
    for path, message in (
        ("file", "already exists"),
        ("dangling", "leads nowhere"),
        ("loop", "leads nowhere"),
        ("file/below", "is not a directory"),
        ("loop/below", "is not a directory"),
    ):
        with pytest.raises(DataError, match=message):
            check_new_directory(tmp_path / path)
    check_new_directory(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()

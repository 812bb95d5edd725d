"""A rename that replaces nothing."""

import os

import pytest

from macbook_optimization import exclusive_rename
from macbook_optimization.exclusive_rename import rename_exclusively


@pytest.fixture(params=["system call", "two names"])
def way(request, monkeypatch):
    if request.param == "two names":  # as on file systems that do not know the call
        monkeypatch.setattr(exclusive_rename, "_system_call", lambda: None)
    elif exclusive_rename._system_call() is None:
        pytest.skip("this system has no such call")


@pytest.mark.usefixtures("way")
def test_a_file_is_renamed_as_it_is(tmp_path):
    (tmp_path / "one").write_text("content")
    before = os.stat(tmp_path / "one")
    rename_exclusively(tmp_path / "one", tmp_path / "other")
    assert os.listdir(tmp_path) == ["other"]
    assert os.stat(tmp_path / "other").st_ino == before.st_ino
    assert os.stat(tmp_path / "other").st_mtime_ns == before.st_mtime_ns


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_nothing_is_replaced(tmp_path, kind):
    (tmp_path / "one").write_text("content")
    if kind == "file":
        (tmp_path / "other").write_text("of somebody else")
    elif kind == "directory":
        (tmp_path / "other").mkdir()
    else:
        (tmp_path / "other").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        rename_exclusively(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one").read_text() == "content"
    assert kind != "file" or (tmp_path / "other").read_text() == "of somebody else"


@pytest.mark.usefixtures("way")
def test_a_missing_file_is_named_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        rename_exclusively(tmp_path / "one", tmp_path / "other")
    assert caught.value.filename == str(tmp_path / "one")

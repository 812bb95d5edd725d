"""The hint of a failed file operation fits its cause."""

import errno

import pytest

from macbook_optimization.file_errors import hint_for, reason_of


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.ENOSPC, "disk space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "read-only"),
        (errno.EEXIST, "a file is in its place"),
        (errno.ENOTDIR, "in the place of a directory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "open files"),
        (errno.ELOOP, "symbolic links"),
    ],
)
def test_the_hint_follows_from_the_cause(code, word):
    assert word in hint_for(OSError(code, "message"), "Build it again.")


def test_a_cause_that_does_not_say_what_to_do_leaves_it_to_the_caller():
    error = OSError(errno.EIO, "Input/output error")
    assert hint_for(error, "Build it again.") == "Build it again."
    assert hint_for(error) is None
    assert reason_of(error) == "Input/output error"
    assert reason_of(OSError("only words")) == "only words"

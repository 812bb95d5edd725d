"""An mbox is split as the standard library splits it, in constant memory."""

import io
import mailbox
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import DataError
from trm.tasks.documents import mbox
from trm.tasks.documents.mbox import split_mbox

FROM = b"From a@b.c Mon Jan  1 00:00:00 2024\n"


def split(content, **options):
    return [found.raw for found in split_mbox(io.BytesIO(content), **options)]


def test_messages_are_split_at_separators_after_an_empty_line():
    content = FROM + b"Subject: a\n\none\nFrom here on\n\n" + FROM + b"Subject: b\n\ntwo\n"
    assert split(content) == [b"Subject: a\n\none\nFrom here on\n", b"Subject: b\n\ntwo\n"]


def test_a_sentence_that_starts_with_from_is_not_a_separator():
    content = FROM + b"Subject: a\n\none\n\nFrom time to time\nI write.\n\nFrom now on.\n"
    assert len(split(content)) == 1


def test_a_separator_without_a_date_is_followed_by_a_header():
    assert len(split(b"From a\nSubject: x\n\none\n\nFrom b\nSubject: y\n\ntwo\n")) == 2


def test_quoted_from_lines_are_restored():
    content = FROM + b"Subject: a\n\n>From me\n>>From you\n> From them\n"
    assert split(content) == [b"Subject: a\n\nFrom me\n>From you\n> From them\n"]


def test_line_ends_of_windows_are_understood():
    content = (FROM + b"Subject: a\n\none\n\n" + FROM + b"Subject: b\n\ntwo\n").replace(b"\n", b"\r\n")
    assert split(content) == [b"Subject: a\r\n\r\none\r\n", b"Subject: b\r\n\r\ntwo\r\n"]


def test_empty_lines_at_the_start_are_passed_over():
    assert split(b"\n\r\n" + FROM + b"Subject: a\n\none\n") == [b"Subject: a\n\none\n"]
    assert split(b"") == split(b"\n\n") == []


def test_something_else_is_refused():
    with pytest.raises(DataError, match="no message of an mbox at byte 0"):
        split(b"Subject: a\n\none\n")


def test_reading_continues_where_it_stopped():
    content = b"".join(FROM + b"Subject: %d\n\nbody\n\n" % number for number in range(5))
    found = list(split_mbox(io.BytesIO(content)))
    assert [one.end_offset for one in found] == [*(one.offset for one in found[1:]), len(content)]
    for number, one in enumerate(found):
        stream = io.BytesIO(content)
        stream.seek(one.end_offset)
        assert list(split_mbox(stream, one.end_offset)) == found[number + 1 :]


def test_an_offset_inside_a_message_is_refused():
    stream = io.BytesIO(FROM + b"Subject: a\n\nbody\n")
    stream.seek(3)
    with pytest.raises(DataError, match="at byte 3"):
        list(split_mbox(stream, 3))


bodies = st.lists(
    st.sampled_from([b"word\n", b"\n", b">From x\n", b"Fro", b"From", b"\r\n", b"x" * 70]), max_size=9
)


@given(st.lists(bodies, min_size=1, max_size=6), st.sampled_from([1, 7, 64, 5000]))
def test_chunks_do_not_change_the_result(messages, chunk_bytes):
    """Separators are found wherever the chunks end."""
    raws = [b"Subject: s\n\n" + b"".join(body).replace(b"\nFrom", b"\n From") + b"\n" for body in messages]
    content = b"".join(FROM + raw + b"\n" for raw in raws)

    class Slowly(io.BytesIO):
        def read(self, size=-1):
            return super().read(max(chunk_bytes, len(FROM)))

    expected = [raw.replace(b"\n>From", b"\nFrom") for raw in raws]
    found = [one.raw for one in split_mbox(Slowly(content))]
    assert [raw.rstrip() for raw in found] == [raw.rstrip() for raw in expected]


def test_messages_equal_those_of_the_standard_library(tmp_path):
    path = tmp_path / "in.mbox"
    box = mailbox.mbox(path)
    for number in range(20):
        box.add(f"Subject: {number}\n\nFrom me\n\nFrom you\n>quoted\n\n\n")
    box.close()
    ours = split(path.read_bytes())
    theirs = [message.as_bytes() for message in mailbox.mbox(path)]
    assert len(ours) == 20
    assert [raw.replace(b"\nFrom", b"\n>From") for raw in ours] == theirs


class Repeated(io.RawIOBase):
    """A message of many zeros between two others, which exists nowhere as a whole."""

    def __init__(self, num_zeros):
        self.left = num_zeros
        self.before = FROM + b"Subject: a\n\none\n\n" + FROM + b"Subject: huge\n\n"
        self.after = b"\n\n" + FROM + b"Subject: b\n\ntwo\n"

    def read(self, size=-1):
        if self.before:
            chunk, self.before = self.before, b""
        elif self.left > 0:
            chunk = bytes(min(size, self.left))
            self.left -= len(chunk)
        else:
            chunk, self.after = self.after, b""
        return chunk


def test_a_message_beyond_the_limit_is_passed_over_in_constant_memory():
    tracemalloc.start()
    found = list(split_mbox(Repeated(300 * 2**20), limit=2**20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.raw for one in found] == [b"Subject: a\n\none\n", None, b"Subject: b\n\ntwo\n"]
    assert found[1].end_offset == found[2].offset
    assert peak < 8 * 2**20


def test_a_message_just_beyond_the_limit_is_passed_over():
    content = FROM + b"x" * 100 + b"\n\n" + FROM + b"Subject: b\n\ntwo\n"
    assert split(content, limit=100) == [None, b"Subject: b\n\ntwo\n"]
    assert split(content, limit=102)[0] == b"x" * 100 + b"\n"
    assert mbox._CHUNK_BYTES > 100  # so both are decided without a second chunk

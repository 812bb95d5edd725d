"""Lines are delivered as they arrive, with their numbers, and none of them takes more memory than it may."""

import pytest

from macbook_optimization.errors import DataError
from trm.cli.lines import MAX_LINE_BYTES, MAX_SKIPPED_BYTES, batches_of_lines


def arriving(*chunks):
    """Return a `read` that returns these chunks and then the end."""
    waiting = iter((*chunks, b""))
    return lambda: next(waiting)


def numbered(*chunks, most=64):
    batches = batches_of_lines(arriving(*chunks), most)
    return [[(line.number, line.content) for line in batch] for batch in batches]


def test_blank_lines_are_counted_but_not_returned():
    assert numbered(b"a\n\n  \r\nb") == [[(1, b"a")], [(4, b"b")]]


def test_a_line_may_arrive_in_pieces():
    assert numbered(b"ab", b"c", b"d\ne") == [[(1, b"abcd")], [(2, b"e")]]


def test_lines_are_returned_in_batches_of_a_maximum_size():
    assert numbered(b"a\nb\nc\n", most=2) == [[(1, b"a"), (2, b"b")], [(3, b"c")]]


def test_a_line_is_returned_before_the_next_one_is_read():
    """A person who types one line gets an answer to it."""

    def read():
        yield b"first\n"
        raise AssertionError("the next line was awaited first")

    (line,) = next(batches_of_lines(read().__next__, 64))
    assert line.content == b"first"


def test_an_endless_stream_is_never_collected():
    batches = batches_of_lines(lambda: b"1...\n" * 100, 64)
    for _, batch in zip(range(1000), batches, strict=False):
        assert len(batch) <= 64


def test_a_line_that_is_too_long_is_refused():
    (longest,), (longer,) = batches_of_lines(
        arriving(b"x" * MAX_LINE_BYTES + b"\n", b"x" * MAX_LINE_BYTES, b"x"), 64
    )
    longest.check_length()
    with pytest.raises(DataError, match="longer than"):
        longer.check_length()


def test_the_lines_after_a_long_one_keep_their_numbers():
    chunks = [b"x" * MAX_LINE_BYTES] * 5
    (long,), (last,) = batches_of_lines(arriving(b"\n", *chunks, b"\n", b"good\n"), 64)
    assert (long.number, len(long.content)) == (2, MAX_LINE_BYTES + 1)
    assert (last.number, last.content) == (3, b"good")
    last.check_length()


def test_a_line_without_an_end_is_given_up():
    count = 0

    def read():
        nonlocal count
        count += 1
        return bytes(16 * MAX_LINE_BYTES)

    with pytest.raises(DataError, match="Line 1 does not end"):
        list(batches_of_lines(read, 64))
    assert count * 16 * MAX_LINE_BYTES < 2 * MAX_SKIPPED_BYTES


def test_an_empty_stream_has_no_lines():
    assert numbered() == []
    assert numbered(b"\n", b" \n") == []

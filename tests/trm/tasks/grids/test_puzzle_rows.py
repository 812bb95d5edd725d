"""Files of puzzles in all their forms, and files that only look like one."""

import gzip
import io
import lzma
import os
import re
import sys

import pytest

from macbook_optimization.errors import DataError
from macbook_optimization.units import MIB
from trm.tasks.grids.puzzle_rows import STANDARD_INPUT, Row, read_rows

QUESTION = "1234.............."[:16]
ANSWER = "1234341221434321"
ROWS = [Row(2, QUESTION, ANSWER), Row(3, ANSWER)]


def read(path, max_bytes=MIB):
    return read_rows(path, 16, max_bytes)


def refusal(path, max_bytes=MIB):
    with pytest.raises(DataError) as refused:
        read(path, max_bytes)
    return f"{refused.value} hint: {refused.value.hint}"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_columns_are_separated_by_commas_semicolons_or_tabs(tmp_path, delimiter, quote):
    rows = (["Puzzle", "Solution"], [QUESTION, ANSWER], [ANSWER, ""])
    lines = [delimiter.join(f"{quote}{cell}{quote}" for cell in row) for row in rows]
    (tmp_path / "p.csv").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert read(tmp_path / "p.csv") == ROWS
    (tmp_path / "p.csv").write_text("\n".join(lines[1:]))
    assert [(row.question, row.answer) for row in read(tmp_path / "p.csv")] == [
        (row.question, row.answer) for row in ROWS
    ]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    (tmp_path / "p.csv").write_text(f"\n\nquestion\n\n{QUESTION}\n")
    assert read(tmp_path / "p.csv") == [Row(5, QUESTION)]


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("board;result", "'board', 'result'"),
        ("sudoku", "'sudoku'"),
        ("id,Rätsel,Lösung", "'id', 'Rätsel', 'Lösung'"),
        ("Solution", "'Solution'"),
    ],
)
def test_an_unknown_header_is_named_with_what_is_expected(tmp_path, header, found):
    (tmp_path / "p.csv").write_text(f"{header}\n{QUESTION};{ANSWER}\n")
    text = refusal(tmp_path / "p.csv")
    assert f"p.csv: the header has {found}; none of its columns is the question" in text
    assert "question, puzzle, quizzes, quiz or q, and the answer answer, solution" in text


@pytest.mark.parametrize("column", ["question", "answer", "rating", "source", "solution"])
def test_a_header_with_the_same_column_twice_is_refused(tmp_path, column):
    (tmp_path / "p.csv").write_text(f"question,answer,{column}, {column.upper()} \n{QUESTION},{ANSWER},1,2\n")
    text = refusal(tmp_path / "p.csv")
    assert re.search(rf"p\.csv: the header has [23] columns named '{column}'", text)
    assert "Remove or rename" in text


def test_a_column_that_is_not_used_may_be_there_twice(tmp_path):
    (tmp_path / "p.csv").write_text(f"question,note,note,answer\n{QUESTION},a,b,{ANSWER}\n")
    assert read(tmp_path / "p.csv") == ROWS[:1]


def test_a_puzzle_of_letters_is_not_a_header(tmp_path):
    (tmp_path / "p.txt").write_text("abcdefghijklmnop\n")
    assert read(tmp_path / "p.txt") == [Row(1, "abcdefghijklmnop")]


def lines_of(num_bytes):
    return (f"{QUESTION}\n".encode() * (num_bytes // 17 + 1))[:num_bytes]


BOMBS = {"gz": gzip.compress, "xz": lzma.compress, "txt": bytes}


@pytest.mark.parametrize("suffix", BOMBS)
@pytest.mark.parametrize("name", ["p.{}", "p"])
def test_a_file_may_have_as_many_bytes_as_the_limit_after_it_is_unpacked(tmp_path, suffix, name):
    path = tmp_path / name.format(suffix)
    path.write_bytes(BOMBS[suffix](lines_of(170_000)))
    assert len(read(path, 170_000)) == 10_000
    text = refusal(path, 169_999)
    assert "has more than 0.1621 MiB of text" in text
    assert "--max-input-mb" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(8_000_000), "line 1 has more than 4,000,000 bytes"),
        (b"1" * 500_000 + b"\n", "field larger than field limit"),
        (b"\n" * 3_000_000, "100,001 of 100,001 rows have fewer than 16 cells"),
        (b",,\n" * 1_000_000, "100,001 of 100,001 rows have fewer than 16 cells"),
        (b"12\n" * 1_000_000, "100,001 of 100,001 rows have fewer than 16 cells"),
    ],
)
def test_a_small_file_that_unpacks_to_nonsense_is_given_up_early(tmp_path, content, reason):
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(content))
    assert reason in refusal(tmp_path / "p.csv.gz", 1024 * MIB)


def test_empty_lines_between_many_puzzles_are_skipped(tmp_path):
    (tmp_path / "p.txt").write_text(f"{QUESTION}\n\n" * 110_000)
    assert len(read(tmp_path / "p.txt", 4 * MIB)) == 110_000


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz"])
def test_a_pipe_a_device_or_a_directory_is_refused_immediately(tmp_path, name):
    for create, kind in (
        (os.mkfifo, "it is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (os.mkdir, "Is a directory"),
    ):
        create(tmp_path / name)
        assert kind in refusal(tmp_path / name)
        (tmp_path / name).rename(tmp_path / f"{name}.{kind}")


@pytest.mark.parametrize(
    "packed",
    [b"\x1f\x8b and more", b"\xfd7zXZ\0 and more", gzip.compress(b"x" * 99)[:-9]],
    ids=[
        "no gzip",
        "no xz",
        "truncated",
    ],  # an archive contains the time, and workers must agree on the names
)
def test_a_damaged_archive_is_refused(tmp_path, packed):
    (tmp_path / "p").write_bytes(packed)
    assert "cannot be read as a file of puzzles" in refusal(tmp_path / "p")


def test_a_changed_byte_of_an_archive_is_refused(tmp_path):
    packed = bytearray(gzip.compress(os.urandom(5000)))
    packed[30] ^= 0xFF
    (tmp_path / "p.gz").write_bytes(packed)
    assert "cannot be read as a file of puzzles" in refusal(tmp_path / "p.gz")


class StandardInput:
    def __init__(self, content):
        self.buffer = io.BufferedReader(io.BytesIO(content))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_is_read_within_the_same_limit(monkeypatch, pack):
    monkeypatch.setattr(sys, "stdin", StandardInput(pack(lines_of(170))))
    assert len(read(STANDARD_INPUT, 170)) == 10
    monkeypatch.setattr(sys, "stdin", StandardInput(pack(lines_of(171))))
    assert "standard input has more than" in refusal(STANDARD_INPUT, 170)


def test_memory_that_runs_out_is_an_error_in_words(tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError

    (tmp_path / "p.txt").write_text(f"{QUESTION}\n")
    monkeypatch.setattr("trm.tasks.grids.puzzle_rows.Row", fail)
    assert "does not fit into memory" in refusal(tmp_path / "p.txt")

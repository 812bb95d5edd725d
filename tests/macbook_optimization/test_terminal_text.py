"""What reaches a terminal, and how it is wrapped and aligned."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.terminal_text import align, one_line, visible, wrap_words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten", r"over\rwritten"),
        ("back\b\b\b", r"back\x08\x08\x08"),
        ("\x9b2J", r"\x9b2J"),
        ("\x7f\x00", r"\x7f\x00"),
        ("exe.\u202egpj", r"exe.\u202egpj"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("ö, 数独 and ğ", "ö, 数独 and ğ"),
    ],
)
def test_control_characters_are_shown_as_codes(text, shown):
    assert visible(text) == shown
    assert visible(shown) == shown


@given(st.text())
def test_no_text_has_control_characters_left(text):
    assert all(unicodedata.category(each) != "Cc" or each in "\n\t" for each in visible(text))
    assert all(unicodedata.category(each) != "Cc" for each in one_line(text))
    assert len(one_line(text).splitlines()) <= 1
    without_styles = re.sub(r"\x1b\[[\d;]*m", "", visible(text, keep_styles=True))
    assert "\x1b" not in without_styles


def test_styles_stay_on_request_and_other_codes_do_not():
    assert visible("\x1b[1m5\x1b[0m\x1b[2J", keep_styles=True) == "\x1b[1m5\x1b[0m\\x1b[2J"


def test_a_name_in_a_line_has_no_line_breaks():
    assert one_line("run\nrun  done\t100%") == r"run\nrun  done\t100%"


def test_columns_begin_at_the_same_place_and_empty_ones_are_left_out():
    rows = [["a", "", "12 s", "x"], ["数独", "", "5 s"], ["e\u0301\n", "", "", "y"]]
    assert align(rows) == ["a     12 s  x", "数独  5 s", "e\u0301\\n         y"]
    assert align([]) == []


def test_messages_break_between_words_and_hang_below_their_text():
    plan = (
        "Plan: 2 x 8 examples (larger ones are not faster)\n      2 threads in 2 workers (as measured here)"
    )
    assert wrap_words(plan, 39).splitlines() == [
        "Plan: 2 x 8 examples (larger ones are",
        "        not faster)",
        "      2 threads in 2 workers (as",
        "        measured here)",
    ]
    assert wrap_words(plan, 79) == plan


def test_a_path_stays_whole_and_so_does_an_option():
    path = "/a/rather/long/path/that/is/longer/than-a-line"
    wrapped = wrap_words(f"There is no {path} yet; use --max-steps instead.", 24).splitlines()
    assert f"  {path}" in wrapped
    assert any("--max-steps" in line for line in wrapped)
    assert wrap_words("", 40) == ""

"""How progress looks in a given number of columns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.progress_lines import Bar, clock, fit_bar, fit_status

FACTS = ("loss 0.184", "best 70.3%", "235 samples/s")


def bar_of(done=113, total=400, what="training", facts=FACTS, began=0.0):
    """Return a bar after 29 s that has been recorded every second."""
    bar = Bar(what, total, began)
    for second in range(30):
        bar.record(float(second), done * second // 29, total, facts)
    return bar


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            119,
            "training  ━━━━━━──────────────────  113/400  loss 0.184  best 70.3%  235 samples/s  "
            "0:29  eta 1:13",
        ),
        (79, "━━━━───────────  113/400  loss 0.184  best 70.3%  235 samples/s  0:29  eta 1:13"),
        (59, "113/400  loss 0.184  best 70.3%  235 samples/s  eta 1:13"),
        (39, "━━──────  113/400  loss 0.184  eta 1:13"),
        (29, "113/400"),
        (6, "28%"),
        (2, ""),
    ],
)
def test_a_narrow_bar_loses_its_least_important_fields(columns, line):
    assert fit_bar(bar_of(), 29.0, columns) == line


def test_80_columns_hold_every_number_of_a_long_run():
    bar = bar_of(12345, 50000)
    bar.began = -36000.0
    line = fit_bar(bar, 29.0, 79)
    for text in ("12345/50000", *FACTS, "10:00:29", "eta "):
        assert text in line
    assert "─" in line, "the bar is shown beside the numbers"


@given(
    columns=st.integers(0, 200),
    done=st.integers(0, 10**9),
    more=st.integers(1, 10**9),
    facts=st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30), max_size=4),
)
def test_a_line_fits_and_every_field_in_it_is_whole(columns, done, more, facts):
    bar = Bar("reading", done + more, 0.0)
    bar.record(0.0, 0, done + more, tuple(facts))
    bar.record(7.0, done, done + more, tuple(facts))
    line = fit_bar(bar, 7.0, columns)
    assert len(line) <= columns
    left = bar.seconds_left(7.0)
    eta = "" if left is None else f"eta {clock(left)}"
    whole = {"reading", f"{done}/{done + more}", *facts, "0:07", eta}
    assert all(part in whole or set(part) <= set("━─") or part.endswith("%") for part in line.split("  "))


def test_the_time_left_follows_the_recent_speed():
    bar = Bar("training", 1000, 0.0)
    for second in range(101):  # one per second, then ten per second
        bar.record(float(second), second, 1000, ())
    for second in range(101, 141):
        bar.record(float(second), 100 + 10 * (second - 100), 1000, ())
    assert bar.seconds_left(140.0) == pytest.approx(50, abs=2)
    assert bar.seconds_left(150.0) == pytest.approx(40, abs=2)
    assert bar.seconds_left(500.0) == 0


def test_the_time_left_is_unknown_until_something_was_measured():
    bar = Bar("training", 400, 0.0)
    bar.record(0.0, 113, 400, ())
    assert bar.seconds_left(3.0) is None
    assert fit_bar(bar, 3.0, 39) == "training  ━━━───────────  113/400  0:03"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0:00"), (44, "0:44"), (754, "12:34"), (3600, "1:00:00"), (360000, "100:00:00")],
)
def test_durations_are_clocks(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (40, "Loading PyTorch ...  0:02"),
        (22, "Loading PyTorch  0:02"),
        (20, "Loading  0:02"),
        (5, "0:02"),
        (2, ""),
    ],
)
def test_a_status_loses_whole_words(columns, line):
    assert fit_status("Loading PyTorch", 2.0, columns) == line

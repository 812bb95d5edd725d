"""The display of progress on a terminal and elsewhere. `Screen` is a terminal that wraps lines again when its
width changes, as most do."""

import io
import re
import sys
import time

import pytest
from rich.console import Console, ConsoleDimensions

from macbook_optimization import progress_monitoring
from macbook_optimization.progress_monitoring import ProgressDisplay

FACTS = ("loss 0.184", "best 70.3%", "235 samples/s")


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Screen(io.StringIO):
    """Interprets the few control codes that the display uses. Rows are lists of characters; `joined[i]` says
    that row i continues in the next one."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns
        self.rows = [[]]
        self.joined = [False]
        self.row = 0
        self.column = 0
        self.wraps = True
        self.cursor_is_visible = True
        self.resize_before_write = None

    def write(self, text):
        if self.resize_before_write is not None:
            self.resize(self.resize_before_write)
            self.resize_before_write = None
        for code, final, plain in re.findall(r"\033\[([?\d;]*)([A-Za-z])|([^\033])", text):
            if plain:
                self._put(plain)
            else:
                self._control(code, final)
        return len(text)

    def _put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.joined[self.row] = False
            self._next_row()
        else:
            if self.column == self.columns:
                if not self.wraps:
                    self.column -= 1
                else:
                    self.joined[self.row] = True
                    self._next_row()
            row = self.rows[self.row]
            row.extend(" " * (self.column + 1 - len(row)))
            row[self.column] = character
            self.column += 1

    def _next_row(self):
        self.row += 1
        self.column = 0
        if self.row == len(self.rows):
            self.rows.append([])
            self.joined.append(False)

    def _control(self, code, final):
        if final == "A":
            self.row = max(0, self.row - int(code or 1))
        elif final in "JK":
            del self.rows[self.row][self.column :]
            self.joined[self.row] = False
            if final == "J":
                del self.rows[self.row + 1 :], self.joined[self.row + 1 :]
        elif final in "hl" and code == "?7":
            self.wraps = final == "h"
        elif final in "hl" and code == "?25":
            self.cursor_is_visible = final == "h"
        else:
            assert final == "m", (code, final)

    def resize(self, columns):
        """Wrap all lines again; the cursor stays at its character."""
        rows, joined = [], []
        where = (0, 0)
        line, offset = [], None
        for number, row in enumerate(self.rows):
            if number == self.row:
                offset = len(line) + self.column
            line += row
            if self.joined[number]:
                continue
            pieces = [line[start : start + columns] for start in range(0, len(line), columns)] or [[]]
            if offset is not None:
                where = (len(rows) + min(offset // columns, len(pieces) - 1), offset % columns)
                offset = None
            rows += pieces
            joined += [True] * (len(pieces) - 1) + [False]
            line = []
        self.columns = columns
        self.rows, self.joined = rows, joined
        self.row, self.column = where

    def lines(self):
        return [text for row in self.rows if (text := "".join(row).rstrip())]


class ScreenConsole(Console):
    @property
    def size(self):
        return ConsoleDimensions(self.file.columns, 24)


@pytest.fixture
def live():
    """Return a display on a screen, with a clock; the console is as wide as the screen."""

    def make(columns):
        screen = Screen(columns)
        clock = Clock()
        console = ScreenConsole(file=screen, force_terminal=True, highlight=False, _environ={"TERM": "xterm"})
        return ProgressDisplay(console=console, now=clock), screen, clock

    return make


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            120,
            "training  ━━━━━━──────────────────  113/400  loss 0.184  best 70.3%  235 samples/s  "
            "0:12  eta 0:30",
        ),
        (80, "━━━━───────────  113/400  loss 0.184  best 70.3%  235 samples/s  0:12  eta 0:30"),
        (60, "113/400  loss 0.184  best 70.3%  235 samples/s  eta 0:30"),
        (40, "━━──────  113/400  loss 0.184  eta 0:30"),
        (29, "113/400"),
    ],
)
def test_the_bar_fits_the_terminal(live, columns, line):
    display, screen, clock = live(columns)
    display.update("training", 0, 400)
    clock.seconds = 12
    display.update("training", 113, 400, *FACTS)
    display.draw()
    assert screen.lines() == [line]


@pytest.mark.parametrize("before", [40, 60, 80, 120])
@pytest.mark.parametrize("after", [20, 40, 60, 80, 120])
def test_nothing_old_remains_after_a_resize(live, before, after):
    display, screen, clock = live(before)
    display.message("A step takes 91 ms.")
    for second in range(3):
        clock.seconds = second
        display.update("training", 100 + second, 400, *FACTS)
        display.update("evaluating", 30 * second, 256)
        display.draw()
    screen.resize(after)
    display.draw()
    num_bars = 2 if after >= 30 else 1
    assert "".join(screen.lines()[:-num_bars]) == "A step takes 91 ms."
    bars = screen.lines()[-num_bars:]
    assert all(len(line) < after for line in bars)
    assert bars[0].count("102/400") == 1
    with display:
        pass
    assert "".join(screen.lines()) == "A step takes 91 ms."
    assert screen.cursor_is_visible


def test_a_terminal_that_narrows_while_a_line_is_written_does_not_wrap_it(live):
    display, screen, _ = live(80)
    display.message("A step takes 91 ms.")
    display.update("training", 113, 400, *FACTS)
    screen.resize_before_write = 40
    display.draw()
    display.draw()
    assert screen.lines() == ["A step takes 91 ms.", "━─────  113/400  loss 0.184  best 70.3%"]


def test_messages_stay_above_the_bars(live):
    display, screen, _ = live(40)
    display.update("training", 1, 400, "loss 1.0")
    display.draw()
    display.message("Tuning: the first steps try different batch sizes and thread counts.")
    assert screen.lines() == [
        "Tuning: the first steps try different",
        "  batch sizes and thread counts.",
        "training  ──────  1/400  loss 1.0  0:00",
    ]


def test_several_bars_have_their_own_times_and_disappear_when_done(live):
    display, screen, clock = live(80)
    for second in range(5):
        clock.seconds = second
        display.update("training", second, 10)
    display.update("evaluating", 64, 256)
    display.draw()
    assert len(screen.lines()) == 1, "short work does not flicker"
    clock.seconds = 6
    display.update("evaluating", 128, 256)
    display.draw()
    assert [line.split("  ")[2:] for line in screen.lines()] == [
        ["4/10", "0:06", "eta 0:04"],
        ["128/256", "0:02", "eta 0:04"],
    ]
    display.update("evaluating", 256, 256)
    display.draw()
    assert len(screen.lines()) == 1
    clock.seconds = 60  # a second evaluation begins at 0:00
    display.update("evaluating", 64, 256)
    clock.seconds = 61
    display.draw()
    assert screen.lines()[1].endswith("64/256  0:01")
    display.update("evaluating", 32, 256)  # it begins again with a smaller batch
    clock.seconds = 62
    display.draw()
    assert screen.lines()[1].endswith("32/256  0:01")
    display.update("evaluating", 256, 256)
    display.update("training", 10, 10)
    display.draw()
    assert screen.lines() == []


class Weather:
    """A panel of two lines, or of none."""

    def __init__(self):
        self.shown = True

    def lines(self, columns, *, ascii_only):
        return [f"sunny in {columns} columns", "wind: ━━──"] if self.shown else []

    def summary(self):
        return "sunny"


def test_a_panel_replaces_one_bar_while_that_work_is_in_progress(live):
    display, screen, clock = live(60)
    weather = Weather()
    display.panel(weather, "training")
    display.draw()
    assert screen.lines() == []
    display.update("training", 1, 10)
    display.update("evaluating", 1, 10)
    clock.seconds = 1
    display.draw()
    assert screen.lines()[:2] == ["sunny in 59 columns", "wind: ━━──"]
    assert screen.lines()[2].startswith("evaluating")
    weather.shown = False  # it has nothing to show yet
    display.draw()
    assert [line.split()[0] for line in screen.lines()] == ["training", "evaluating"]
    display.update("evaluating", 10, 10)
    display.update("training", 10, 10)
    display.draw()
    assert screen.lines() == []


def test_a_panel_for_no_work_in_particular_is_always_shown(live):
    display, screen, _ = live(60)
    display.panel(Weather())
    display.draw()
    assert screen.lines() == ["sunny in 59 columns", "wind: ━━──"]
    screen.resize(30)
    display.draw()
    assert screen.lines() == ["sunny in 29 columns", "wind: ━━──"]


def test_elsewhere_the_line_of_that_work_has_the_summary():
    file, clock = io.StringIO(), Clock()
    display = ProgressDisplay(console=Console(file=file), now=clock)
    display.panel(Weather(), "training")
    display.update("training", 1, 10, "loss 1")
    clock.seconds = 6
    display.update("training", 2, 10, "loss 1")
    assert file.getvalue() == "training: 2/10 loss 1  sunny\n"


def test_a_status_is_shown_until_there_is_progress(live):
    display, screen, clock = live(80)
    display.status("Loading PyTorch")
    assert screen.lines() == ["Loading PyTorch ...  0:00"]
    clock.seconds = 2
    display.draw()
    assert screen.lines() == ["Loading PyTorch ...  0:02"]
    display.update("training", 1, 400)
    display.draw()
    assert "Loading" not in screen.lines()[0]
    display.update("training", 400, 400)
    display.status("Saving")
    display.status("")
    assert screen.lines() == []


def test_control_characters_of_names_are_shown_as_codes(live):
    display, screen, _ = live(120)
    display.message("There is no \033[2Jset yet.")
    display.status("Reading \033[5A\r\nset")
    assert screen.lines() == [r"There is no \x1b[2Jset yet.", r"Reading \x1b[5A\r set ...  0:00"]
    display.update("reading \033[2J", 1, 2, "\a")
    display.draw()
    assert r"reading \x1b[2J" in screen.lines()[-1]
    assert r"\x07" in screen.lines()[-1]


def test_control_characters_do_not_reach_a_log_either():
    display, file, clock = plain_display()
    display.message("a\033[2J")
    display.update("b\r", 0, 9)
    clock.seconds = 9
    display.update("b\r", 1, 9)
    assert file.getvalue() == "a\\x1b[2J\nb\\r: 1/9\n"


def test_warnings_of_libraries_keep_their_colours_and_nothing_else(live):
    display, screen, _ = live(80)
    written = []
    screen.write = written.append
    with display:
        sys.stderr.write("\033[33mslow\033[0m\033[2J\n")
    assert any("\033[33mslow\033[0m\\x1b[2J\n" in text for text in written)


def test_nothing_is_written_while_nothing_changes(live):
    display, screen, _ = live(80)
    display.draw()
    display.update("training", 1, 400)
    display.draw()
    screen.write = None  # any call would fail
    display.draw()
    display.update("training", 1, 400)
    display.draw()


def test_a_live_display_refreshes_itself_and_keeps_warnings_above(live):
    display, screen, clock = live(80)
    before = sys.stderr
    with display:
        display.status("Loading PyTorch")
        clock.seconds = 1
        deadline = time.monotonic() + 5
        while "0:01" not in screen.lines()[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert screen.lines() == ["Loading PyTorch ...  0:01"]
        sys.stderr.write("UserWarning: ")
        sys.stderr.write("slow\n")
        assert screen.lines() == ["UserWarning: slow", "Loading PyTorch ...  0:01"]
        sys.stderr.write("no newline")
    assert sys.stderr is before
    assert screen.lines() == ["UserWarning: slow", "no newline"]


def test_there_are_at_most_ten_renders_per_second():
    assert progress_monitoring.REFRESH_SECONDS >= 0.1


def plain_display(**environment):
    clock = Clock()
    console = Console(file=io.StringIO(), width=40, force_terminal=False, _environ=environment)
    return ProgressDisplay(console=console, now=clock), console.file, clock


def test_elsewhere_a_message_is_one_line_and_progress_a_line_every_five_seconds():
    display, file, clock = plain_display()
    with display:
        display.message("Tuning: the first steps try different batch sizes and thread counts.")
        display.status("Starting the trainer", plain=True)
        display.status("Loading PyTorch")
        for second in range(12):
            clock.seconds = second
            display.update("training", second, 12, FACTS[0], "", FACTS[1])
    assert file.getvalue().splitlines() == [
        "Tuning: the first steps try different batch sizes and thread counts.",
        "Starting the trainer.",
        "training: 5/12 loss 0.184  best 70.3%",
        "training: 10/12 loss 0.184  best 70.3%",
    ]


def test_a_terminal_without_control_codes_gets_plain_lines():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    with ProgressDisplay(console=console) as display:
        display.update("training", 1, 2)
        display.message("done")
    assert file.getvalue() == "done\n"


def test_a_display_without_standard_error_is_silent(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressDisplay() as display:
        display.message("nobody reads this")
    assert capsys.readouterr().out == ""


def test_forced_colours_do_not_put_control_codes_into_a_log(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with ProgressDisplay() as display:
        display.update("training", 1, 2)
        display.message("done")
    assert log.getvalue() == "done\n"

"""Progress in a given number of columns: pure functions from values to one line of text.

A line that is too narrow loses whole fields and never parts of them. The fields in order of importance: the
count, the time left, the facts in their order, the bar, the elapsed time, the description. Room that is left
widens the bar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

COUNT_ONLY_BELOW_COLUMNS = 30
CLEAR_LIVE_LINES = "\r\033[J\033[?25h"  # from the cursor, which rests at their start, and show it
_BAR_COLUMNS = 24
_LEAST_BAR_COLUMNS = 6  # then 80 columns hold it beside all numbers of a run of some hours
_SPEED_SECONDS = 30.0  # the time left is that of the recent speed
_GAP = "  "
_WIDE_GAP = "   "
FILLED = "━"
REST = "─"
ASCII_MARKS = "#-"  # for a terminal without those


@dataclass
class Bar:
    """The progress of one piece of work. Times are in seconds of any clock."""

    what: str
    total: int
    began: float
    done: int = 0
    facts: tuple[str, ...] = ()
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1000))

    def record(self, now: float, done: int, total: int, facts: tuple[str, ...]) -> None:
        self.done = done
        self.total = total
        self.facts = facts
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_SECONDS:
            self._samples.popleft()

    def seconds_left(self, now: float) -> float | None:
        """Return the time left at the recent speed, or None while nothing has been measured."""
        then, done_then = self._samples[0]
        done = self.done - done_then
        if done <= 0:
            return None
        latest = self._samples[-1][0]
        at_latest = (latest - then) * (self.total - self.done) / done
        return max(0.0, at_latest - (now - latest))


def fit_bar(bar: Bar, now: float, columns: int, filled: str = FILLED, rest: str = REST) -> str:
    """Return the bar as one line of at most `columns` characters."""
    count = f"{bar.done}/{bar.total}"
    if columns < max(COUNT_ONLY_BELOW_COLUMNS, len(count)):
        percent = f"{bar.done / max(1, bar.total):.0%}"
        return next(text for text in (count, percent, "") if len(text) <= max(0, columns))
    left = bar.seconds_left(now)
    eta = "" if left is None else f"eta {clock(left)}"
    numbers = [eta, *bar.facts]
    (eta, *facts), room = _fitting(numbers, columns - len(count))
    elapsed = what = ""
    if [eta, *facts] == numbers:
        for_bar = len(_GAP) + _LEAST_BAR_COLUMNS
        reserved = for_bar if room >= for_bar else 0
        (elapsed, what), room = _fitting([clock(now - bar.began), bar.what], room - reserved)
        room += reserved
    drawing = draw_bar(bar.done / max(1, bar.total), min(_BAR_COLUMNS, room - len(_GAP)), filled, rest)
    return _GAP.join(filter(None, (what, drawing, count, *facts, elapsed, eta)))


def _fitting(texts: Sequence[str], room: int) -> tuple[list[str], int]:
    """Return the texts, empty from the first that has no room on, and the room that is left."""
    shown = [""] * len(texts)
    for number, text in enumerate(texts):
        needed = len(text) + len(_GAP) if text else 0
        if needed > room:
            break
        room -= needed
        shown[number] = text
    return shown, room


def draw_bar(share: float, columns: int, filled: str = FILLED, rest: str = REST) -> str:
    """Return a bar, or nothing where there is too little room for one."""
    if columns < _LEAST_BAR_COLUMNS:
        return ""
    num_filled = int(columns * min(1.0, max(0.0, share)))
    return filled * num_filled + rest * (columns - num_filled)


def fit_texts(texts: Sequence[str], columns: int) -> list[str]:
    """Return the texts side by side, in as many lines as they need; one that is too long is shortened."""
    lines: list[str] = []
    for text in filter(None, texts):
        if lines and len(lines[-1]) + len(_WIDE_GAP) + len(text) <= columns:
            lines[-1] += _WIDE_GAP + text
        else:
            lines.append(shorten(text, columns))
    return lines


def shorten(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: max(0, columns - 3)]}..."[: max(0, columns)]


def fit_status(text: str, seconds: float, columns: int) -> str:
    """Return what is happening and for how long; words at the end are left out where there is no room."""
    elapsed = clock(seconds)
    words = [*text.split(), "..."]
    while words:
        line = f"{' '.join(words)}{_GAP}{elapsed}"
        if len(line) <= columns:
            return line
        words.pop()
    return elapsed if len(elapsed) <= columns else ""


def clock(seconds: float) -> str:
    """Return a duration as 0:44, 12:07 or 3:25:00."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

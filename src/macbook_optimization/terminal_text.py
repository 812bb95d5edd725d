"""Text on a terminal: which characters must not reach it, and how lines are wrapped and aligned.

Names of files, recipes and mail are chosen by others. Control characters in them could move the cursor, erase
what was printed before, or set the title of the window, so they are shown as codes, such as \\x1b.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

# All control characters but line feed and tab, and the marks that change the direction of what follows.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_STYLE_OR_CONTROL = re.compile(rf"(?P<style>\x1b\[[\d;]*m)|{_CONTROL.pattern}")
_LINE_BREAK_OR_TAB = re.compile("[\n\t\u2028\u2029]")
_GAP = "  "


def visible(text: str, *, keep_styles: bool = False) -> str:
    """Return the text with its control characters as codes; lines and tabs stay, and styles on request."""
    if keep_styles:
        return _STYLE_OR_CONTROL.sub(lambda found: found["style"] or _code(found), text)
    return _CONTROL.sub(_code, text)


def one_line(text: str) -> str:
    """Return a name for a place in a line: line breaks and tabs are codes, too."""
    return _LINE_BREAK_OR_TAB.sub(_code, visible(text))


def _code(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def wrap_words(text: str, columns: int) -> str:
    """Wrap every line between words; what follows a break is indented deeper than the text itself.

    A word that is longer than a line, such as a path, stays whole.
    """
    lines = text.splitlines()
    indent = max((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(
        textwrap.fill(
            line,
            max(columns, indent + 10),
            subsequent_indent=" " * (indent + 2),
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        for line in lines
    )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with columns that begin at the same place. Columns without text are left out."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    columns = list(zip_longest(*cells, fillvalue=""))
    widths = [max(map(_num_columns, column)) for column in columns]
    padded = (
        [cell + " " * (width - _num_columns(cell)) for cell in column]
        for column, width in zip(columns, widths, strict=True)
        if width
    )
    return [_GAP.join(line).rstrip() for line in zip(*padded, strict=True)]


def _num_columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: East Asian characters take two, accents none."""
    return sum(
        0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )

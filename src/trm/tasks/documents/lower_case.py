"""Lower case by the rules of the language.

Turkish has a dotted and a dotless i, each with an upper-case form of its own. Which lower-case letter an I
stands for depends on the language, so a text with letters that only Turkish uses is lowered as Turkish.
"""

from __future__ import annotations

import re

_TURKISH_LETTERS = re.compile(r"[ğĞşŞıİ]")
_MIN_TURKISH_SHARE = 0.005  # of all characters; a name in an English mail stays below it
_TO_TURKISH_LOWER = str.maketrans({"I": "ı", "İ": "i"})


def is_turkish(text: str) -> bool:
    """Return whether a text has enough letters that only Turkish uses."""
    sample = text[:4000]
    return len(_TURKISH_LETTERS.findall(sample)) > _MIN_TURKISH_SHARE * len(sample)


def lower(text: str) -> str:
    """Return a text in lower case, by the rules of its language."""
    if is_turkish(text):
        return text.translate(_TO_TURKISH_LOWER).lower()
    return text.replace("İ", "i").lower()  # `lower` alone would add a combining dot

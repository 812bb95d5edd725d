"""The words of a message, in lower case, and the n-grams made of them.

Turkish has a dotted and a dotless i, each with an upper-case form of its own. Which lower-case letter an I
stands for depends on the language, so a text with letters that only Turkish uses is lowered as Turkish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from trm.tasks.documents.mail import Mail

_WORD = re.compile(r"\w\w+|[$!?%€£₺]+")
_TURKISH_LETTERS = re.compile(r"[ğĞşŞıİ]")
_MIN_TURKISH_SHARE = 0.005  # of all characters; a name in an English mail stays below it
_LONG_NUMBER = 5  # longer ones are replaced by their length: accounts and telephone numbers do not repeat
_FORM = ("H:has:", "H:part:")  # header features that say nothing about what is written
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


def words(text: str) -> list[str]:
    found = _WORD.findall(lower(text))
    return [word if len(word) <= _LONG_NUMBER else _shortened(word) for word in found]


def _shortened(word: str) -> str:
    return f"#{len(word)}" if word.isdecimal() else word[:40]


def ngrams(mail: Mail) -> Iterator[str]:
    """Iterate over the features of a message: its words, pairs of them, and marked words of subject and
    headers."""
    subject = words(mail.subject)
    return chain(
        with_pairs(subject + words(mail.text)),
        (f"S:{word}" for word in subject),
        (f"H:{word}" for word in mail.header_words),
        (f"L:{domain}" for domain in mail.link_domains),
        (f"A:{kind}" for kind in mail.attachments),
    )


def with_pairs(of: Sequence[str]) -> Iterator[str]:
    return chain(of, map(" ".join, pairwise(of)))


def is_content(ngram: str) -> bool:
    """Whether a feature is a single word, domain or file type: not a pair of words, and not what almost every
    message has, such as a header of that name or a part of plain text."""
    return " " not in ngram and not ngram.startswith(_FORM)

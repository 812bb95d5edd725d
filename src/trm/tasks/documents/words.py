"""The words of a message, in lower case, and the n-grams made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from trm.tasks.documents.lower_case import lower
from trm.tasks.documents.mail import Mail

_WORD = re.compile(r"\w\w+|[$!?%€£₺]+")
_LONG_NUMBER = 5  # longer ones are replaced by their length: accounts and telephone numbers do not repeat
_FORM = ("H:has:", "H:part:")  # header features that say nothing about what is written


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
    """Return whether a feature is a single word, domain or file type: not a pair of words, nor what almost
    every message has, such as a header of that name or a part of plain text."""
    return " " not in ngram and not ngram.startswith(_FORM)

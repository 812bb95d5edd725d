"""A description of a collection of mail, before anything is trained on it.

Every message is counted once as parsed, truncated or skipped, and once as used, without a category, or
skipped: both sums are the number of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from macbook_optimization.json_types import JsonObject
from trm.tasks.documents.duplicates import Groups
from trm.tasks.documents.lower_case import is_turkish
from trm.tasks.documents.mail import VERDICTS, Mail, Verdict
from trm.tasks.documents.words import words

Language = Literal["English", "Turkish", "other", "unknown"]
LANGUAGES: tuple[Language, ...] = ("English", "Turkish", "other", "unknown")
FEW_MESSAGES = 20  # of a category: too few to learn from
_UNBALANCED = 20.0  # times as many in the largest category as in the smallest
_MANY_COPIES = 0.3
_MANY_WITHOUT_CATEGORY = 0.1  # of all messages
_SAMPLE_CHARACTERS = 4000
_MIN_WORDS = 6  # for a guess at the language
_MIN_SHARE = 0.06  # of all words; it is above 0.2 in running text
_ENGLISH = frozenset((
    "the", "and", "to", "of", "in", "is", "you", "that", "for", "it", "on", "with", "this", "your",
    "we", "are", "have", "be", "not", "from", "at", "as", "by", "an", "or", "if", "will", "can", "was",
    "has", "our", "but", "all", "my", "me", "they", "what", "so", "no", "do", "please",
))  # fmt: skip
# Without words that other languages have as well: de, en, ne, size, biz.
_TURKISH = frozenset((
    "ve", "bir", "bu", "için", "icin", "ile", "çok", "cok", "daha", "olarak", "gibi", "değil", "degil",
    "sayın", "sayin", "merhaba", "sizin", "olan", "kadar", "veya", "şu", "siz", "lütfen", "lutfen",
    "tarafından", "göre", "gore", "sonra", "teşekkür", "tesekkur", "nasıl", "şekilde", "ancak",
    "olduğu",
))  # fmt: skip


def language_of(mail: Mail) -> Language:
    """Guess the language from the most frequent words of English and Turkish. Anything else is "other"."""
    text = f"{mail.subject}\n{mail.text[:_SAMPLE_CHARACTERS]}"
    found = [word for word in words(text) if word.isalpha()]
    if len(found) < _MIN_WORDS:
        return "Turkish" if is_turkish(text) and any(word in _TURKISH for word in found) else "unknown"
    english = sum(word in _ENGLISH for word in found) / len(found)
    turkish = sum(word in _TURKISH for word in found) / len(found)
    if turkish > english and (turkish >= _MIN_SHARE or is_turkish(text)):
        return "Turkish"
    return "English" if english >= _MIN_SHARE else "other"


@dataclass(frozen=True, slots=True)
class QualityReport:
    num_messages: int
    verdicts: dict[str, int]
    reasons: dict[str, dict[str, int]]  # of those that were truncated or skipped
    categories: dict[str, int]  # of the messages that are used
    num_without_category: int
    num_empty: int  # of those used: without subject and text
    num_exact_copies: int  # of those used: messages that repeat an earlier one
    num_near_copies: int
    languages: dict[str, int]

    @property
    def num_used(self) -> int:
        return sum(self.categories.values())

    def warnings(self) -> list[str]:
        return list(_warnings(self))

    def to_json(self) -> JsonObject:
        return {
            "messages": self.num_messages,
            "verdicts": self.verdicts,
            "reasons": self.reasons,
            "used": self.num_used,
            "without_category": self.num_without_category,
            "categories": self.categories,
            "empty": self.num_empty,
            "exact_copies": self.num_exact_copies,
            "near_copies": self.num_near_copies,
            "languages": self.languages,
            "warnings": self.warnings(),
        }

    def text(self) -> str:
        return "\n".join(_lines(self))


class Judged(Protocol):
    """The facts of a message that are counted."""

    @property
    def verdict(self) -> Verdict: ...

    @property
    def reason(self) -> str: ...

    @property
    def is_empty(self) -> bool: ...


@dataclass(slots=True)
class QualityCounter:
    """Collects the report while messages are read."""

    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    categories: Counter[str] = field(default_factory=Counter)
    num_without_category: int = 0
    num_empty: int = 0
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, mail: Judged, category: str | None, language: Language, count: int = 1) -> None:
        """Count messages. Only those that are used, with a category, count for anything but the verdict."""
        self.verdicts[mail.verdict] += count
        if mail.reason:
            self.reasons.setdefault(mail.verdict, Counter())[mail.reason] += count
        if mail.verdict == "skipped":
            return
        if category is None:
            self.num_without_category += count
            return
        self.categories[category] += count
        self.num_empty += count * mail.is_empty
        self.languages[language] += count

    def report(self, groups: Groups) -> QualityReport:
        """Return the report, with the copies among the messages that are used."""
        return QualityReport(
            num_messages=self.verdicts.total(),
            verdicts={name: self.verdicts[name] for name in VERDICTS},
            reasons={name: _sorted(counts) for name, counts in sorted(self.reasons.items())},
            categories=_sorted(self.categories),
            num_without_category=self.num_without_category,
            num_empty=self.num_empty,
            num_exact_copies=groups.num_exact_copies,
            num_near_copies=groups.num_near_copies,
            languages={name: self.languages[name] for name in LANGUAGES if self.languages[name]},
        )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _warnings(report: QualityReport) -> Iterator[str]:
    if len(report.categories) < 2:
        yield f"{'One category' if report.categories else 'No category'} was found; a classifier needs two."
        return
    without = report.num_without_category
    if without > _MANY_WITHOUT_CATEGORY * report.num_messages:
        yield (
            f"Without a category: {without:,} of {report.num_messages:,} messages. Such mail is not learned. "
            "`trm email mapping MAIL --out FILE` writes a mapping of folders and labels to edit."
        )
    counts = report.categories
    few = [name for name, count in counts.items() if count < FEW_MESSAGES]
    if few:
        yield f"Fewer than {FEW_MESSAGES} messages: {', '.join(few[:10])}."
    if max(counts.values()) > _UNBALANCED * min(counts.values()):
        yield "The largest category has more than 20 times as many messages as the smallest."
    copies = report.num_exact_copies + report.num_near_copies
    if copies > _MANY_COPIES * report.num_used:
        yield f"{copies / report.num_used:.0%} of the messages are copies or near-copies of others."


def _lines(report: QualityReport) -> Iterator[str]:
    verdicts = ", ".join(f"{count:,} {name}" for name, count in report.verdicts.items())
    yield f"Messages     {report.num_messages:,}: {verdicts}"
    for verdict, reasons in report.reasons.items():
        for reason, count in reasons.items():
            yield f"  {verdict:<10} {count:,}: {reason}"
    left_out = f"{report.num_without_category:,} without a category, {report.verdicts['skipped']:,} skipped"
    yield f"Used         {report.num_used:,}; {left_out}"
    for name, count in report.categories.items():
        yield f"  {count:>8,}  {count / report.num_used:>6.1%}  {name}"
    yield f"Copies       {report.num_exact_copies:,} exact, {report.num_near_copies:,} nearly the same"
    yield f"Empty        {report.num_empty:,} without subject and text"
    languages = ", ".join(f"{name} {count:,}" for name, count in report.languages.items())
    yield f"Languages    {languages or 'none'} (a guess from frequent words)"
    for warning in report.warnings():
        yield f"Warning: {warning}"

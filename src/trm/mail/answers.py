"""The answer about a message: the same object whether a model or a server decided.

This module loads neither a model nor NumPy, so that clients of a server start quickly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from macbook_optimization.json_types import JsonObject
from macbook_optimization.terminal_text import one_line

if TYPE_CHECKING:
    from trm.mail.model import Decision
    from trm.mail.reading import Read


MAX_SUBJECT = 200  # characters in an answer


class Choice(NamedTuple):
    category: str
    confidence: float
    unsure: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """One message. It has no category if it could not be read."""

    path: str
    category: str | None
    confidence: float | None
    unsure: bool
    verdict: str  # parsed, truncated or skipped
    reason: str | None
    subject: str = ""  # its beginning

    @property
    def choice(self) -> Choice | None:
        if self.category is None or self.confidence is None:
            return None
        return Choice(self.category, self.confidence, self.unsure)

    def to_json(self) -> JsonObject:
        return asdict(self)

    def text(self) -> str:
        if self.category is None or self.confidence is None:
            return one_line(f"{'skipped':16} {'':6}  {self.path}  ({self.reason})")
        mark = "?" if self.unsure else " "
        line = f"{self.category:16} {self.confidence:6.1%}{mark} {self.path}"
        return one_line(f"{line}  {self.subject[:60]}" if self.subject else line)


def answer_of(read: Read, decision: Decision | None) -> Answer:
    mail = read.features.mail
    return Answer(
        path=read.message.key,
        category=None if decision is None else decision.category,
        confidence=None if decision is None else decision.confidence,
        unsure=decision is None or decision.unsure,
        verdict=mail.verdict,
        reason=mail.reason or None,
        subject=mail.subject[:MAX_SUBJECT],
    )


def skipped(path: str, reason: str) -> Answer:
    """Return the answer about a message that could not be read at all."""
    return Answer(path, None, None, True, "skipped", reason)

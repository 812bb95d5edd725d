"""From mailboxes to features: messages are read here and parsed in workers with limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trm.tasks.documents.duplicates import Fingerprint, fingerprint
from trm.tasks.documents.mail import Mail, parse_mail
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.parse_pool import Failure, ParsePool
from trm.tasks.documents.quality import Language, language_of
from trm.tasks.documents.tokens import bounded
from trm.tasks.documents.words import ngrams


@dataclass(frozen=True, slots=True)
class Features:
    """The result of a worker for a message."""

    mail: Mail  # without text and header words that nothing needs: passing them on costs time
    counts: Counter[str]
    fingerprint: Fingerprint | None = None
    language: Language = "unknown"


def features_of(raw: bytes, num_tokens: int = 0) -> Features:
    """Return what classifying needs. `num_tokens`: how many tokens may be made of the message."""
    mail = parse_mail(raw)
    return Features(_kept(mail, num_tokens), Counter(ngrams(mail)))


def training_features_of(raw: bytes, num_tokens: int = 0) -> Features:
    """Return what training needs."""
    mail = parse_mail(raw)
    return Features(_kept(mail, num_tokens), Counter(ngrams(mail)), fingerprint(mail), language_of(mail))


def _kept(mail: Mail, num_tokens: int) -> Mail:
    if num_tokens:
        return bounded(mail, num_tokens)
    return replace(mail, text=mail.text[:1], header_words=())  # enough to see that it is not empty


@dataclass(frozen=True, slots=True)
class Read:
    """A message with its features; one that could not be read has empty features and a reason."""

    message: Message
    features: Features


def read_features(messages: Iterable[Message], pool: ParsePool[Features]) -> Iterator[Read]:
    """Yield every message with a verdict, in order."""
    for message, result in pool.map(messages):
        if isinstance(result, Failure):
            yield Read(message, Features(Mail("skipped", result.reason), Counter()))
        else:
            yield Read(message, result)

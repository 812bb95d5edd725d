"""Records of an import: facts for report and split, and the content that tokens are made of."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from trm.tasks.documents.duplicates import NO_WORDS, Fingerprint, fingerprint
from trm.tasks.documents.mail import Mail, Verdict, parse_mail
from trm.tasks.documents.quality import Language, language_of
from trm.tasks.documents.tokens import bounded, features

FORMAT = 1  # raise it when the same message gives another record
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a message beside its content."""

    verdict: Verdict
    reason: str = ""
    is_empty: bool = False
    language: Language = "unknown"
    labels: tuple[str, ...] = ()  # of a Google Takeout
    date: float | None = None
    thread: str = ""
    num_characters: int = 0  # of subject, text and features
    key: str = ""
    folders: tuple[str, ...] = ()

    def to_line(self) -> bytes:
        values = (
            self.verdict, self.reason, self.is_empty, self.language, self.labels, self.date, self.thread,
            self.num_characters, self.key, self.folders,
        )  # fmt: skip
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Facts:
        verdict, reason, is_empty, language, labels, date, thread, size, key, folders = json.loads(line)
        return cls(
            verdict, reason, is_empty, language, tuple(labels), date, thread, size, key, tuple(folders)
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a worker for a message. One that was skipped has neither fingerprint nor content."""

    facts: Facts
    fingerprint: Fingerprint = NO_WORDS
    content: bytes = b""


def record_of(raw: bytes, num_tokens: int) -> Record:
    """Parse a message in a worker, and keep what a dataset, its split and its report need."""
    mail = parse_mail(raw)
    kept = bounded(mail, num_tokens)
    num_characters = len(kept.subject) + len(kept.text) + sum(map(len, features(kept)))
    facts = Facts(
        verdict=mail.verdict,
        reason=mail.reason,
        is_empty=mail.is_empty,
        language=language_of(mail),
        labels=mail.labels,
        date=mail.date,
        thread=mail.thread,
        num_characters=num_characters,
    )
    if mail.verdict == "skipped":
        return Record(facts)
    return Record(facts, fingerprint(mail), pack_content(kept))


def pack_content(mail: Mail) -> bytes:
    """Return what tokens are made of, in compressed form."""
    values = (mail.subject, mail.text, mail.header_words, mail.link_domains, mail.attachments)
    text = json.dumps(values, ensure_ascii=False)
    return zlib.compress(text.encode("utf-8", "surrogatepass"), _COMPRESSION_LEVEL)


def unpack_content(content: bytes) -> Mail:
    values = json.loads(zlib.decompress(content).decode("utf-8", "surrogatepass"))
    subject, text, header_words, link_domains, attachments = values
    return Mail(
        "parsed",
        subject=subject,
        text=text,
        header_words=tuple(header_words),
        link_domains=tuple(link_domains),
        attachments=tuple(attachments),
    )

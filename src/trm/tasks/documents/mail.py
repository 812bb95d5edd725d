"""From the bytes of a message to what a classifier may use.

Every message gets a verdict: `parsed`, `truncated` (a limit cut something; the rest is used) or `skipped`
with a reason. Headers that say how somebody else classified the message are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import Literal

from trm.tasks.documents.html_text import html_to_text
from trm.tasks.documents.lower_case import lower
from trm.tasks.documents.mime import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_BYTES,
    Headers,
    Part,
    decode_words,
    first,
    parse_structure,
)

Verdict = Literal["parsed", "truncated", "skipped"]
VERDICTS: tuple[Verdict, ...] = ("parsed", "truncated", "skipped")
MAX_TEXT_CHARACTERS = 256 * 2**10
MAX_ALL_TEXT_BYTES = 2**19  # of all parts together, before they are decoded
MAX_LINKS = 200
TOO_LARGE = f"larger than {MAX_MESSAGE_BYTES // 2**20} MiB"
_ADDRESS = re.compile(r"([\w.+%'=&/-]{1,100})@([\w.-]{1,250})")
_URL = re.compile(r"https?://([^\s/<>\"'?#:)\]]{1,253})", re.IGNORECASE)
_WORD = re.compile(r"\w[\w.'-]{0,40}")
_MESSAGE_ID = re.compile(r"<([^<>\s]{1,250})>")
_EXTENSION = re.compile(r"\.(\w{1,8})$")
# Values that say something about a message. Their words are marked with the name of the header.
_VALUE_HEADERS = (
    "x-mailer", "user-agent", "organization", "precedence", "x-priority", "importance", "list-id",
)  # fmt: skip
_MAX_ADDRESS_CHARACTERS = 2000
_ADDRESS_HEADERS = ("from", "reply-to", "sender", "return-path", "to", "cc")
# Names that come from a mailbox, a filter or a newsreader rather than from the sender.
_NOT_OF_THE_SENDER = re.compile(
    r"x-spam|x-gmail|x-gm-|x-folder|x-origin|x-filename|x-keywords|x-uidl?$|status$|x-status|xref$|"
    r"newsgroups$|path$|followup-to$|lines$|delivered-to$|received|date$|authentication|arc-|dkim|x-virus|"
    r"x-mozilla|x-evolution|x-label|x-category|x-trm",
)


@dataclass(frozen=True, slots=True)
class Mail:
    verdict: Verdict
    reason: str = ""  # why it was truncated or skipped
    subject: str = ""
    text: str = ""
    sender: str = ""  # address, lower case
    date: float | None = None  # seconds since 1970
    message_id: str = ""
    thread: str = ""  # the first message of the conversation, as far as it is known
    labels: tuple[str, ...] = ()  # of a Google Takeout
    header_words: tuple[str, ...] = ()
    link_domains: tuple[str, ...] = ()
    attachments: tuple[str, ...] = ()  # extensions or types

    @property
    def is_empty(self) -> bool:
        return not (self.subject.strip() or self.text.strip())


def parse_mail(raw: bytes) -> Mail:
    """Parse a message. Never raises: a message that cannot be used is skipped with a reason."""
    if len(raw) > MAX_MESSAGE_BYTES:
        return Mail("skipped", TOO_LARGE)
    if not raw.strip():
        return Mail("skipped", "empty")
    structure = parse_structure(raw)
    headers = structure.headers
    reading = _read_parts(structure.parts)
    limits = list(dict.fromkeys([*structure.limits, *reading.limits]))
    message_id = _message_id(first(headers, "message-id"))
    return Mail(
        verdict="truncated" if limits else "parsed",
        reason=", ".join(limits),
        subject=_one_line(decode_words(first(headers, "subject"))),
        text=reading.text,
        sender=_address(first(headers, "from")),
        date=_date(first(headers, "date")),
        message_id=message_id,
        thread=_message_id(first(headers, "references"))
        or _message_id(first(headers, "in-reply-to"))
        or message_id,
        labels=_labels(headers),
        header_words=tuple(_header_words(headers, structure.parts)),
        link_domains=reading.link_domains,
        attachments=reading.attachments,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    text: str
    link_domains: tuple[str, ...]
    attachments: tuple[str, ...]
    limits: list[str]


def _read_parts(parts: list[Part]) -> _Reading:
    """Join the texts. HTML is used where a message has no plain text beside it."""
    plain: list[str] = []
    marked_up: list[str] = []
    links: list[str] = []
    attachments: list[str] = []
    limits: list[str] = []
    left = MAX_ALL_TEXT_BYTES
    for part in parts:
        if part.is_attachment or part.content_type not in ("text/plain", "text/html"):
            attachments.append(_kind_of_attachment(part))
            continue
        text, cut = part.text(min(left, MAX_TEXT_BYTES))
        left = max(0, left - len(part.body))
        if part.content_type == "text/html":
            found = html_to_text(text)
            cut = cut or found.truncated
            links += _URL.findall(" ".join(found.links[:MAX_LINKS]))
            text = found.text
            marked_up.append(text)
        else:
            plain.append(text)
        if cut:
            limits.append("text")
    text = "\n".join(plain).strip() or "\n".join(marked_up).strip()
    if len(text) > MAX_TEXT_CHARACTERS:
        limits.append("text")
    text = text[:MAX_TEXT_CHARACTERS]
    domains = dict.fromkeys(lower(domain) for domain in (_URL.findall(text) + links)[:MAX_LINKS])
    return _Reading(text, tuple(domains), tuple(attachments), limits)


def _kind_of_attachment(part: Part) -> str:
    extension = _EXTENSION.search(part.file_name)
    return lower(extension[1]) if extension else part.content_type


def _header_words(headers: Headers, parts: list[Part]) -> Iterator[str]:
    """Yield words that describe how a message was made and sent, each marked with where it comes from."""
    for name in headers:
        if not _NOT_OF_THE_SENDER.match(name):
            yield f"has:{name}"
    for name in _ADDRESS_HEADERS:
        for value in headers.get(name, ())[:5]:
            for domain in _domains(value[:_MAX_ADDRESS_CHARACTERS])[:10]:
                yield f"{name}:{lower(domain).strip('.')}"
    for word in _WORD.findall(lower(decode_words(first(headers, "from")).partition("<")[0]))[:10]:
        yield f"from:{word}"
    for name in _VALUE_HEADERS:
        for word in _WORD.findall(lower(decode_words(first(headers, name))))[:10]:
            yield f"{name}:{word}"
    for part in parts[:20]:
        yield f"part:{part.content_type}"


def _domains(value: str) -> list[str]:
    return [domain for _, domain in _ADDRESS.findall(value)] if "@" in value else []


def _address(value: str) -> str:
    _, bracket, inside = value.rpartition("<")
    found = _ADDRESS.search(inside if bracket else value) or _ADDRESS.search(value)
    return lower(found[0]) if found else ""


def _message_id(value: str) -> str:
    found = _MESSAGE_ID.search(value)
    return found[1] if found else ""


def _date(value: str) -> float | None:
    """Return the time of a Date header, or None where it is missing or impossible."""
    try:
        parsed = parsedate_tz(value[:100])
        return float(mktime_tz(parsed)) if parsed else None
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def _labels(headers: Headers) -> tuple[str, ...]:
    """Return the labels of a Google Takeout: comma-separated, with quotes around those that have a comma."""
    text = _one_line(decode_words(first(headers, "x-gmail-labels")))
    found = re.findall(r'"([^"]{1,200})"|([^,"]{1,200})', text)
    return tuple(label for quoted, plain in found if (label := (quoted or plain).strip()))


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""Add the decision to a message as headers, and leave every other byte alone."""

from __future__ import annotations

import re
from email.header import Header
from typing import Protocol

PREFIX = "X-TRM-"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


class Decided(Protocol):
    """The content of the headers: a decision of a model, or the answer of a server."""

    @property
    def category(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def unsure(self) -> bool: ...


def with_headers(raw: bytes, decision: Decided | None) -> bytes:
    """Return a message with headers in front of its own, where the first of several wins.

    A sender may have written headers of the same name, which come later. `decision` is None for a message
    that could not be read.
    """
    separator, rest = _split_mbox_line(raw)
    ending = "\r\n" if rest.partition(b"\n")[0].endswith(b"\r") else "\n"
    lines = "".join(f"{PREFIX}{name}: {value}{ending}" for name, value in _headers(decision))
    return separator + lines.encode("ascii") + rest


def _headers(decision: Decided | None) -> list[tuple[str, str]]:
    if decision is None:
        return [("Category", "unknown"), ("Confidence", "0.000"), ("Unsure", "yes")]
    return [
        ("Category", _encoded(decision.category)),
        ("Confidence", f"{decision.confidence:.3f}"),
        ("Unsure", "yes" if decision.unsure else "no"),
    ]


def _encoded(text: str) -> str:
    """Return a header value of ASCII characters without line breaks: names of folders may have any."""
    plain = _CONTROL.sub(" ", text.encode("utf-8", "replace").decode())
    return plain if plain.isascii() else Header(plain, "utf-8", maxlinelen=10_000).encode()


def _split_mbox_line(raw: bytes) -> tuple[bytes, bytes]:
    if not raw.startswith(b"From "):
        return b"", raw
    line, newline, rest = raw.partition(b"\n")
    return line + newline, rest

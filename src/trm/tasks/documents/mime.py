"""The structure of a message: headers, and parts whose text is decoded on request.

Mail is hostile input, so this parser is written for bounds rather than completeness: it never recurses, every
loop runs over bytes that were bounded before, and each limit that cuts something is reported. The standard
library's parser overflows the stack on nested parts and takes minutes on floods of encoded words.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trm.tasks.documents.charsets import decode_bytes

MAX_MESSAGE_BYTES = 25 * 2**20
MAX_HEADER_BYTES = 256 * 2**10
MAX_HEADER_LINES = 1000  # of one part
MAX_ALL_HEADER_LINES = 5000  # of all parts together: 25 MB of one-letter headers in parts took 22 s
MAX_VALUE_CHARACTERS = 8 * 2**10  # of one header, after unfolding
MAX_DEPTH = 20
MAX_PARTS = 200  # without parts of their own, or too deep to be read
MAX_TEXT_BYTES = 256 * 2**10  # of one part, before it is decoded
MAX_SEARCHED_BYTES = 2 * MAX_MESSAGE_BYTES  # for delimiters: each level of nesting searches its bytes again
_MAX_LONGER_BOUNDARIES = 100  # lines that only begin as a delimiter does

Headers = Mapping[str, list[str]]  # lower-case name -> values in their order

_NAME = re.compile(rb"([!-9;-~]{1,200})[ \t]*:")
_TYPE = re.compile(r"\s*([\w.+-]{1,60}/[\w.+-]{1,100})")
_BOUNDARY = re.compile(r"""boundary\*?\s{0,9}=\s{0,9}(?:"([^"]{1,1000})"|([^\s;"]{1,1000}))""", re.IGNORECASE)
_CHARSET = re.compile(
    r"""charset\*?\s{0,9}=\s{0,9}["']?(?:[\w.:+-]{0,40}'\w{0,9}')?([\w.:+-]{1,40})""", re.IGNORECASE
)
_FILE_NAME = re.compile(r"""name\*?\s{0,9}=\s{0,9}"?([^";\n]{1,200})""", re.IGNORECASE)
_ENCODED_WORD = re.compile(r"=\?([\w.:+*-]{0,60})\?([bBqQ])\?([^?\n]{0,8192})\?=")


@dataclass(frozen=True, slots=True)
class Part:
    """One part that has no parts of its own."""

    content_type: str
    headers: Headers
    body: bytes  # as transferred

    @property
    def file_name(self) -> str:
        for name in ("content-disposition", "content-type"):
            found = _FILE_NAME.search(first(self.headers, name))
            if found:
                return decode_words(found[1]).strip()
        return ""

    @property
    def is_attachment(self) -> bool:
        return first(self.headers, "content-disposition").lower().lstrip().startswith("attachment")

    def text(self, limit: int = MAX_TEXT_BYTES) -> tuple[str, bool]:
        """Return the decoded text, and whether the limit, in transferred bytes, cut it."""
        body = self.body[:limit]
        encoding = first(self.headers, "content-transfer-encoding").strip().lower()
        charset = _CHARSET.search(first(self.headers, "content-type"))
        text = decode_bytes(_decode_transfer(body, encoding), charset[1] if charset else "")
        return text, len(self.body) > limit


@dataclass(slots=True)
class Structure:
    headers: Headers
    parts: list[Part] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)  # those that cut something


@dataclass(frozen=True, slots=True)
class _Pending:
    """A part that has not been parsed yet: a range of the message."""

    start: int
    end: int
    depth: int
    default_type: str = "text/plain"


def parse_structure(raw: bytes) -> Structure:
    """Split a message into its parts, depth first. `raw` must not exceed `MAX_MESSAGE_BYTES`."""
    message = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found: Structure | None = None
    pending = [_Pending(0, len(message), 0)]
    limits: list[str] = []
    parts: list[Part] = []
    num_lines = num_dropped = num_searched = 0
    while pending and len(parts) + num_dropped < MAX_PARTS and num_lines < MAX_ALL_HEADER_LINES:
        part = pending.pop()
        block = parse_headers(message, part.start, part.end)
        headers = block.headers
        num_lines += block.num_lines
        if block.cut:
            limits.append("headers")
        if found is None:
            found = Structure(headers, parts, limits)
        children = _children(message, part, headers, block.body_start)
        if children is None:
            content_type = _content_type(headers, part.default_type)
            if content_type.startswith("multipart/"):  # without parts: whatever it is, it is read as text
                content_type = "text/plain"
            parts.append(Part(content_type, headers, message[block.body_start : part.end]))
            continue
        num_searched += part.end - part.start
        if part.depth >= MAX_DEPTH or num_searched > MAX_SEARCHED_BYTES:
            limits.append("depth")
            num_dropped += 1
        else:
            pending.extend(reversed(children))
    if pending:
        limits.append("parts" if num_lines < MAX_ALL_HEADER_LINES else "headers")
    if found is None:
        return Structure({}, parts, limits)
    return found


class HeaderBlock(NamedTuple):
    headers: Headers
    body_start: int
    num_lines: int  # that were read
    cut: bool  # by a limit


def parse_headers(message: bytes, start: int, end: int) -> HeaderBlock:
    """Read the headers at the start of a range."""
    stop = min(end, start + MAX_HEADER_BYTES)
    if message.startswith((b"From ", b">From "), start):  # the separator of an mbox
        line_end = message.find(b"\n", start, stop)
        start = stop if line_end < 0 else line_end + 1
    headers: dict[str, list[str]] = {}
    lines: list[bytes] = []  # of the header that is being read
    position = start
    cut = False
    for number in range(1, MAX_HEADER_LINES + 1):
        line_end = message.find(b"\n", position, stop)
        line = message[position : stop if line_end < 0 else line_end]
        if line[:1] in (b" ", b"\t") and lines:
            lines.append(line)
        else:
            cut |= _add_header(headers, lines)
            lines = [line]
            if not line.strip():
                return HeaderBlock(headers, line_end + 1 if line_end >= 0 else stop, number, cut)
            if not _NAME.match(line):  # the body starts without an empty line
                return HeaderBlock(headers, position, number, cut)
        if line_end < 0:
            break
        position = line_end + 1
    cut |= _add_header(headers, lines)
    if line_end < 0 and stop == end:  # there is no body
        return HeaderBlock(headers, end, number, cut)
    empty_line = message.find(b"\n\n", max(start, position - 1), end)
    return HeaderBlock(headers, end if empty_line < 0 else empty_line + 2, number, cut=True)


def first(headers: Headers, name: str) -> str:
    """Return the first value of a header, or an empty text."""
    values = headers.get(name)
    return values[0] if values else ""


def decode_words(text: str) -> str:
    """Decode the encoded words of RFC 2047 in a header value."""
    if "=?" not in text:
        return text
    text = text[:MAX_VALUE_CHARACTERS]
    pieces: list[str] = []
    charset, encoded = "", b""  # of the words that are being joined: a character may be split between two
    position = 0
    for word in _ENCODED_WORD.finditer(text):
        between = text[position : word.start()]
        follows = bool(encoded) and not between.strip()  # blanks between two encoded words do not count
        if encoded and not (follows and word[1].lower() == charset):
            pieces.append(decode_bytes(encoded, charset.partition("*")[0]))
            encoded = b""
        if not follows:
            pieces.append(between)
        charset = word[1].lower()
        encoded += _word_bytes(word[2], word[3])
        position = word.end()
    pieces.append(decode_bytes(encoded, charset.partition("*")[0]))
    pieces.append(text[position:])
    return "".join(pieces)


def _word_bytes(kind: str, content: str) -> bytes:
    data = content.encode("utf-8", "replace")
    return _decode_base64(data) if kind in "bB" else binascii.a2b_qp(data, header=True)


def _add_header(headers: dict[str, list[str]], lines: list[bytes]) -> bool:
    """Decode and add a header. Return whether its value was cut."""
    found = _NAME.match(lines[0]) if lines else None
    if found is None:
        return False
    value = b" ".join([lines[0][found.end() :], *lines[1:]])
    text = decode_bytes(value[: 4 * MAX_VALUE_CHARACTERS], "").strip()
    headers.setdefault(found[1].decode("ascii").lower(), []).append(text[:MAX_VALUE_CHARACTERS])
    return len(text) > MAX_VALUE_CHARACTERS


def _content_type(headers: Headers, default: str) -> str:
    found = _TYPE.match(first(headers, "content-type"))
    return found[1].lower() if found else default


def _children(message: bytes, part: _Pending, headers: Headers, start: int) -> list[_Pending] | None:
    """Return the parts of a part, or None if it has none."""
    content_type = _content_type(headers, part.default_type)
    depth = part.depth + 1
    if content_type == "message/rfc822":
        return [_Pending(start, part.end, depth)]
    if not content_type.startswith("multipart/"):
        return None
    found = _BOUNDARY.search(first(headers, "content-type"))
    if found is None:
        return None
    default = "message/rfc822" if content_type == "multipart/digest" else "text/plain"
    boundary = (found[1] or found[2]).rpartition("''")[2]  # RFC 2231 puts a charset in front
    ranges = list(_between_delimiters(message, start, part.end, boundary))
    if not ranges:
        return None
    return [_Pending(begin, end, depth, default) for begin, end in ranges]


def _between_delimiters(message: bytes, start: int, end: int, boundary: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges between the delimiter lines, at most as many as a message may have parts."""
    delimiter = b"\n--" + boundary.rstrip().encode("utf-8", "replace")
    begin: int | None = None
    position = start - 1  # the line break before the body
    num_ranges = num_others = 0
    while num_ranges <= MAX_PARTS and num_others <= _MAX_LONGER_BOUNDARIES:
        found = message.find(delimiter, position, end)
        if found < 0:
            break
        position = found + len(delimiter)
        line_end = message.find(b"\n", position, end)
        if line_end < 0:
            line_end = end
        rest = message[position:line_end].strip()
        if rest not in (b"", b"--"):
            num_others += 1
            continue
        if begin is not None:
            yield begin, max(begin, found)
            num_ranges += 1
        if rest == b"--":
            return
        begin = min(end, line_end + 1)
        position = line_end
    if begin is not None and num_ranges <= MAX_PARTS:
        yield begin, end


def _decode_transfer(body: bytes, encoding: str) -> bytes:
    if encoding == "base64":
        return _decode_base64(body)
    if encoding == "quoted-printable":
        return binascii.a2b_qp(body)
    return body


_NOT_BASE64 = bytes(
    set(range(256)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
)


def _decode_base64(data: bytes) -> bytes:
    digits = data.translate(None, _NOT_BASE64)
    digits = digits[: len(digits) - (len(digits) % 4 == 1)]
    return binascii.a2b_base64(digits + b"=" * (-len(digits) % 4))

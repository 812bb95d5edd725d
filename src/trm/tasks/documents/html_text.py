"""The text of an HTML part, in linear time.

Every HTML library that was measured takes seconds on some small hostile input, and a classifier needs only
the words and links. So this scanner looks for tags from left to right and never goes back.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARACTERS = 128 * 2**10
MAX_TAGS = 20_000
_LINK = re.compile(r"""(?:href|src)\s{0,9}=\s{0,9}["']?\s{0,9}(https?://[^\s"'<>]{1,300})""", re.IGNORECASE)
_BLOCKS = frozenset((
    "address", "article", "blockquote", "br", "center", "dd", "div", "dl", "dt", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "hr", "li", "ol", "p", "pre", "section", "table", "td", "th", "title",
    "tr", "ul",
))  # fmt: skip
_CLOSING = {  # of elements whose content is not text
    name: re.compile(f"</{name}", re.IGNORECASE | re.ASCII)
    for name in ("script", "style", "template", "noembed", "noframes")
}
_TAG_NAME = re.compile(r"/?([a-zA-Z][a-zA-Z0-9]{0,20})")
_BLANKS = re.compile(r"[ \t\xa0\u200b-\u200f\ufeff]+")


@dataclass(frozen=True, slots=True)
class HtmlText:
    text: str
    links: tuple[str, ...]
    truncated: bool


def html_to_text(source: str) -> HtmlText:
    """Return the visible text with line breaks between blocks, and the addresses of links and pictures."""
    kept = source[:MAX_CHARACTERS]
    pieces: list[str] = []
    links: list[str] = []
    num_tags = 0
    for text, tag in _text_and_tags(kept):
        pieces.append(text)
        num_tags += 1
        if num_tags > MAX_TAGS:
            break
        name = _TAG_NAME.match(tag)
        if name is None:
            continue
        if name[1].lower() in _BLOCKS:
            pieces.append("\n")
        if "=" in tag:
            links += _LINK.findall(tag[:2000])
    joined = _BLANKS.sub(" ", html.unescape("".join(pieces)))
    lines = (line.strip() for line in joined.split("\n"))
    text = "\n".join(line for line in lines if line)
    return HtmlText(text, tuple(links), len(source) > MAX_CHARACTERS or num_tags > MAX_TAGS)


def _text_and_tags(source: str) -> Iterator[tuple[str, str]]:
    """Yield the text before each tag, and the tag without its angle brackets."""
    position = 0
    while True:
        start = source.find("<", position)
        if start < 0:
            break
        opening = source[start + 1 : start + 2]
        if not (opening.isalpha() or opening in ("/", "!", "?")):  # a plain less-than sign
            yield source[position : start + 1], ""
            position = start + 1
            continue
        if source.startswith("<!--", start):
            end = source.find("-->", start + 4)
            after = end + 3
        else:
            end = source.find(">", start + 1)
            after = end + 1
        if end < 0:  # nothing closes any more, so what follows is not markup
            yield source[position:start], ""
            position = len(source) if source.startswith("<!--", start) else start + 1
            break
        tag = source[start + 1 : end]
        yield source[position:start], tag
        position = after
        name = _TAG_NAME.match(tag)
        if name is not None and tag[0] != "/" and name[1].lower() in _CLOSING:
            closing = _CLOSING[name[1].lower()].search(source, after)
            position = closing.start() if closing else len(source)
    yield source[position:], ""

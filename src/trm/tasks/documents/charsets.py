"""From bytes to text, whatever a message says about its encoding.

Only encodings of an allow-list are used: Python has codecs that are not encodings of text, and some that
raise even with `errors="replace"`. Mail often names a subset of what it uses, so the superset is taken,
as browsers do. Bytes without a declared encoding are UTF-8 or else windows-1254: it is windows-1252 but for
six letters, which are Icelandic in one and Turkish in the other.
"""

from __future__ import annotations

import re

_WINDOWS = re.compile(r"(?:x-)?(?:windows|cp|win)-?(125[0-8]|874)")
_SUPERSETS = {
    "ascii": "cp1254",
    "us-ascii": "cp1254",
    "iso-8859-1": "cp1252",
    "latin-1": "cp1252",
    "latin1": "cp1252",
    "l1": "cp1252",
    "iso-8859-9": "cp1254",
    "latin-5": "cp1254",
    "latin5": "cp1254",
    "iso-8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "gb18030": "gb18030",
    "x-gbk": "gb18030",
    "ks-c-5601-1987": "cp949",
    "euc-kr": "cp949",
    "shift-jis": "cp932",
    "sjis": "cp932",
    "x-sjis": "cp932",
    "big5": "cp950",
    "utf8": "utf-8",
    "unicode-1-1-utf-8": "utf-8",
    "macintosh": "mac-roman",
    "x-mac-roman": "mac-roman",
    "x-mac-turkish": "mac-turkish",
}
_SAME = {
    "utf-8", "utf-16", "utf-16le", "utf-16be", "euc-jp", "iso-2022-jp", "koi8-r", "koi8-u", "big5-hkscs",
    "iso-2022-kr", "hz", "cp437", "cp850", "cp852", "cp857", "cp866",
    *(f"iso-8859-{number}" for number in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
}  # fmt: skip
_FALLBACK = "cp1254"
_OFTEN_WRONG = (_FALLBACK, "cp1252")  # declared for bytes that are UTF-8


def codec_name(charset: str) -> str | None:
    """Return Python's name of an encoding that mail may use, or None if it is not one of them."""
    name = charset.strip().strip("\"'").lower().replace("_", "-")
    if name.startswith("iso8859"):
        name = "iso-8859" + name.removeprefix("iso8859")
    if name.startswith("iso-8859-"):
        name = name.removesuffix("-i").removesuffix("-e").partition(":")[0]
    windows = _WINDOWS.fullmatch(name)
    if windows:
        return f"cp{windows[1]}"
    return _SUPERSETS.get(name) or (name if name in _SAME else None)


def decode_bytes(data: bytes, charset: str) -> str:
    """Decode bytes; UTF-8 is tried first where the charset is missing, unknown, ASCII, Latin-1 or Latin-5."""
    codec = codec_name(charset) or _FALLBACK
    if codec in _OFTEN_WRONG:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode(codec, "replace")
    return data.decode(codec, "replace")

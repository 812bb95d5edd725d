"""Bytes become text whatever a message says about them."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.tasks.documents.charsets import codec_name, decode_bytes

TURKISH = "Işık ılık İğde şeker çöp ü"


@pytest.mark.parametrize(
    "name",
    ["windows-1254", "Windows_1254", "cp1254", "iso-8859-9", "ISO8859-9", "iso_8859-9", "latin5", "win-1254"],
)
def test_the_names_of_turkish_charsets_are_known(name):
    assert decode_bytes(TURKISH.encode("windows-1254"), name) == TURKISH


@pytest.mark.parametrize("name", ["", "us-ascii", "unknown-8bit", "iso-8859-9", "cp1252", "utf-8", "x" * 500])
def test_utf_8_is_recognised_behind_a_wrong_name(name):
    assert decode_bytes(TURKISH.encode(), name) == TURKISH


def test_bytes_without_a_charset_may_be_turkish():
    assert decode_bytes(TURKISH.encode("iso-8859-9"), "") == TURKISH
    assert decode_bytes("ñ é ß".encode("cp1252"), "") == "ñ é ß"


def test_latin_1_is_read_as_windows_1252():
    assert decode_bytes(b"\x93\xfe\x94", "iso-8859-1") == "“þ”"


@pytest.mark.parametrize(
    "name", ["idna", "undefined", "punycode", "base64", "zip", "utf-7", "unicode_escape"]
)
def test_codecs_that_are_not_charsets_are_not_used(name):
    assert codec_name(name) is None
    assert decode_bytes(b"abc", name) == "abc"


@given(st.binary(max_size=200), st.sampled_from(["utf-16", "iso-2022-jp", "hz", "gb2312", "big5", "x"]))
def test_any_bytes_are_decoded(data, name):
    decode_bytes(data, name)


def test_every_codec_that_is_named_exists():
    starts = (
        "windows-",
        "cp",
        "x-cp",
        "iso-8859-",
        "iso8859-",
        "iso_8859_",
        "utf-",
        "koi8-",
        "x-",
        "euc-",
        "big",
    )
    ends = (*map(str, range(300)), *map(str, range(1250, 1260)), "r", "u", "jp", "kr", "8-i", "16le", "")
    found = {codec_name(start + end) for start in starts for end in ends} - {None}
    assert {"cp1252", "cp1254", "cp874", "utf-8", "koi8-r", "iso-8859-2"} < found
    for name in found:
        codecs.lookup(name)
